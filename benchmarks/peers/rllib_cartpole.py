"""RLlib's IMPALA in CartPole: one EnvRunner, and a learner in the process of the algorithm.

    python -m venv rllib && rllib/bin/pip install "ray[rllib]" torch
    rllib/bin/python benchmarks/peers/rllib_cartpole.py --envs 64 --seconds 30

Environments are CartPole's own vector, the network has two layers of 64 tanh for policy and value
function each, and an update has the same number of steps as one of Juggler beside it. Prints the
environment steps trained on per second, from ten seconds after the first update on.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import ray
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

STEPS = 32
WARM_UP_SECONDS = 10.0
SLOWEST_START_SECONDS = 120.0


def algorithm(envs: int) -> Any:
    network = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
    )
    config = (
        IMPALAConfig()
        .api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=1,
            num_envs_per_env_runner=envs,
            gym_env_vectorize_mode="vector_entry_point",
            rollout_fragment_length=STEPS,
        )
        .learners(num_learners=0)
        .rl_module(rl_module_spec=RLModuleSpec(model_config=network))
        .training(train_batch_size_per_learner=envs * STEPS, lr=0.0005)
        .reporting(min_time_s_per_iteration=1)
    )
    return config.build_algo()


def steps_per_second(built: Any, seconds: float) -> float:
    """Steps trained on per second, over N seconds after the warm-up.

    Raises:
        TimeoutError: nothing was trained on.
    """
    begun = time.monotonic()
    first_update: float | None = None
    start: tuple[float, float] | None = None
    while True:
        learned = built.train().get("learners", {}).get("default_policy", {})
        now = time.monotonic()
        trained = float(learned.get("num_module_steps_trained_lifetime", 0.0))
        if not trained:
            if now - begun > SLOWEST_START_SECONDS:
                raise TimeoutError(f"RLlib made no update within {SLOWEST_START_SECONDS:.0f} s")
            continue
        first_update = first_update or now
        if start is None and now - first_update >= WARM_UP_SECONDS:
            start = now, trained
        elif start is not None and now - start[0] >= seconds:
            return (trained - start[1]) / (now - start[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    said = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    built = algorithm(said.envs)
    rate = steps_per_second(built, said.seconds)
    print(json.dumps({"steps_per_second": rate, "version": ray.__version__}))
    built.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
