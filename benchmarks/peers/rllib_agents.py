"""RLlib's IMPALA with four CartPole agents in each environment, that share one policy.

    python -m venv rllib && rllib/bin/pip install "ray[rllib]" torch
    rllib/bin/python benchmarks/peers/rllib_agents.py --environments 16 --seconds 30
    juggler train --env juggler:CartPoles --num-env-runners 1 --envs-per-runner 16 --stop-seconds 15

This script prints the agent steps trained on per second, once ten seconds are over. A run of
Juggler has them in its metrics. RLlib 2.40 refuses several environments with several agents in one
EnvRunner; 2.60 takes them.
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
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

AGENTS = 4
WARM_UP_SECONDS = 10


def algorithm(environments: int, runners: int) -> Any:
    config = (
        IMPALAConfig()
        .api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
        .environment(MultiAgentCartPole, env_config={"num_agents": AGENTS})
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=environments,
            rollout_fragment_length=20,
        )
        .learners(num_learners=0)
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
        .rl_module(
            rl_module_spec=RLModuleSpec(
                model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh")
            )
        )
        .training(train_batch_size_per_learner=1024, lr=0.0005)
        .reporting(min_time_s_per_iteration=2)
    )
    return config.build()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--environments", type=int, default=16)
    parser.add_argument("--runners", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    said = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    built = algorithm(said.environments, said.runners)
    begun = time.monotonic()
    first: tuple[float, float] | None = None
    while True:
        learned = built.train().get("learners", {}).get("shared")
        if not learned:  # before the first update
            continue
        now = time.monotonic()
        trained = float(learned["num_module_steps_trained_lifetime"])
        if now - begun > WARM_UP_SECONDS and first is None:
            first = now, trained
        if now - begun > said.seconds and first is not None and now > first[0]:
            break
    rate = (trained - first[1]) / (now - first[0])
    print(json.dumps({"agent_steps_trained": trained, "agent_steps_per_second": round(rate, 1)}))
    built.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
