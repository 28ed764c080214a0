"""Sample Factory's APPO in CartPole or Pong: rollout workers, one policy worker and a learner.

    python -m venv sf && sf/bin/pip install sample-factory torch "ale-py<0.10"
    sf/bin/python benchmarks/peers/sample_factory_agents.py --envs 64 --seconds 30
    sf/bin/python benchmarks/peers/sample_factory_agents.py --game pong --envs 128 --device cuda

Environments are CartPole's own vector in batched sampling, or single Pongs in Gymnasium's wrappers.
The network has two layers of 64 tanh for policy and value function each in CartPole, and Nature's
convolutions in Pong. An update has the same number of steps as one of Juggler beside it, in one
pass. Prints the environment steps trained on per second, from ten seconds after the first update.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.misc import LEARNER_ENV_STEPS, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

STEPS = 32
WARM_UP_SECONDS = 10.0
PONG_ENVS = 16  # of a rollout worker


class Vector(gymnasium.Env):  # type: ignore[misc]
    """A vector, as Sample Factory takes it: each environment is an agent."""

    is_multiagent = True

    def __init__(self, envs: int) -> None:
        self._vector = CartPoleVectorEnv(num_envs=envs)
        self.num_agents = envs
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._vector.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return self._vector.step(actions)


class Trained(AlgoObserver):  # type: ignore[misc]
    """Notes when the learner says how many steps it has trained on, and ends the run in time."""

    def __init__(self, seconds: float) -> None:
        """
        Args:
            seconds: from the first update to the end.
        """
        self._seconds = seconds
        self.seen: list[tuple[float, int]] = []

    def on_init(self, runner: Any) -> None:
        runner.policy_msg_handlers[LEARNER_ENV_STEPS].append(self._note)

    def _note(self, _runner: Any, message: Any, _policy: int) -> None:
        if message[LEARNER_ENV_STEPS]:
            self.seen.append((time.monotonic(), int(message[LEARNER_ENV_STEPS])))

    def on_training_step(self, runner: Any, _iteration: int) -> None:
        if self.seen and time.monotonic() - self.seen[0][0] > self._seconds:
            runner.cfg.train_for_env_steps = 0  # version 2.1 does not heed train_for_seconds

    def rate(self) -> float:
        """Steps per second after the warm-up.

        Raises:
            RuntimeError: there were not enough updates.
        """
        after = [each for each in self.seen if each[0] >= self.seen[0][0] + WARM_UP_SECONDS]
        if len(after) < 2:
            raise RuntimeError(f"Sample Factory made {len(self.seen)} updates")
        (began, first), (ended, last) = after[0], after[-1]
        return (last - first) / (ended - began)


def settings(said: argparse.Namespace, directory: str) -> Any:
    pong = said.game == "pong"
    given = {
        "env": said.game,
        "experiment": said.game,
        "train_dir": directory,
        "device": {"cuda": "gpu"}.get(said.device, "cpu"),
        "num_workers": said.envs // PONG_ENVS if pong else 1,
        "num_envs_per_worker": PONG_ENVS if pong else 1,  # a vector of them
        "worker_num_splits": 2 if pong else 1,
        "batched_sampling": not pong,
        "policy_workers_per_policy": 1,
        "rollout": STEPS,
        "recurrence": 1,
        "batch_size": said.envs * STEPS,
        "num_batches_per_epoch": 1,
        "num_epochs": 1,
        "use_rnn": False,
        "actor_critic_share_weights": pong,
        "nonlinearity": "relu" if pong else "tanh",
        "normalize_input": False,
        "normalize_returns": False,
        "obs_scale": 255.0 if pong else 1.0,
        "reward_scale": 1.0 if pong else 0.1,
        "learning_rate": 0.0005,
        "max_policy_lag": 1000,
    }
    options = [f"--{name}={value}" for name, value in given.items()]
    if pong:
        options += ["--encoder_conv_architecture=convnet_atari"]
    else:
        options += ["--encoder_mlp_layers", "64", "64"]
    parser, _ = parse_sf_args(argv=options)
    return parse_full_cfg(parser, options)


def make_env(game: str, cfg: Any, _where: Any = None, render_mode: Any = None) -> Any:
    if game != "pong":
        return Vector(cfg.batch_size // STEPS)
    import ale_py  # noqa: F401  registers Atari
    from gymnasium.wrappers import AtariPreprocessing, FrameStack, TransformObservation

    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return TransformObservation(FrameStack(AtariPreprocessing(env), 4), np.asarray)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--game", choices=("cartpole", "pong"), default="cartpole")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    said = parser.parse_args()
    register_env(said.game, make_env)
    with tempfile.TemporaryDirectory(prefix="jb-sf-") as directory:
        _, runner = make_runner(settings(said, directory))
        trained = Trained(WARM_UP_SECONDS + said.seconds)
        runner.register_observer(trained)
        status = runner.init()
        if status == ExperimentStatus.SUCCESS:
            status = runner.run()
    if status != ExperimentStatus.SUCCESS:
        sys.exit(f"Sample Factory ended with status {status}")
    print(json.dumps({"steps_per_second": trained.rate()}))


if __name__ == "__main__":
    main()
