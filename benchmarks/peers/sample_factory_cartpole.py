"""Sample Factory's APPO in CartPole: one rollout worker, one policy worker and a learner.

    python -m venv sf && sf/bin/pip install sample-factory torch
    sf/bin/python benchmarks/peers/sample_factory_cartpole.py --envs 64 --seconds 30

Environments are CartPole's own vector, in batched sampling; the network has two layers of 64 tanh
for policy and value function each, and an update has the same number of steps as one of Juggler
beside it, in one pass. Prints the environment steps trained on per second, from ten seconds after
the first update on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.misc import LEARNER_ENV_STEPS, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

STEPS = 32
WARM_UP_SECONDS = 10.0
NAME = "cartpole-vector"


class CartPoles(gymnasium.Env):  # type: ignore[misc]
    """The vector, as Sample Factory takes it: each environment is an agent."""

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


def settings(envs: int, directory: str) -> Any:
    given = {
        "env": NAME,
        "experiment": "cartpole",
        "train_dir": directory,
        "device": "cpu",
        "num_workers": 1,
        "num_envs_per_worker": 1,  # a vector of them
        "worker_num_splits": 1,
        "batched_sampling": True,
        "policy_workers_per_policy": 1,
        "rollout": STEPS,
        "recurrence": 1,
        "batch_size": envs * STEPS,
        "num_batches_per_epoch": 1,
        "num_epochs": 1,
        "use_rnn": False,
        "actor_critic_share_weights": False,
        "nonlinearity": "tanh",
        "normalize_input": False,
        "normalize_returns": False,
        "reward_scale": 0.1,
        "learning_rate": 0.0005,
        "max_policy_lag": 1000,
    }
    options = [f"--{name}={value}" for name, value in given.items()]
    options += ["--encoder_mlp_layers", "64", "64"]
    parser, _ = parse_sf_args(argv=options)
    return parse_full_cfg(parser, options)


def make_env(_name: str, cfg: Any, _where: Any = None, render_mode: Any = None) -> CartPoles:
    return CartPoles(cfg.batch_size // STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    said = parser.parse_args()
    register_env(NAME, make_env)
    with tempfile.TemporaryDirectory(prefix="jb-sf-") as directory:
        _, runner = make_runner(settings(said.envs, directory))
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
