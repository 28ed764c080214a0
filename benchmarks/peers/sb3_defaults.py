"""PPO or A2C by Stable-Baselines3 with its defaults, beside ours in `defaults.py`, with that
package's own Python.

Called with one JSON object: `algorithm`, the environment's `env` (an id, or module:Class) and
`env_kwargs`, the `policy` that its spaces need, `steps`, the `seed`, and how many `episodes` are
played at the end, with the likeliest actions. Prints one JSON line: the mean return of the last 100
episodes of training, and that of those played.
"""

from __future__ import annotations

import importlib
import json
import sys

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor


def make(given: dict) -> Monitor:
    """One environment in a Monitor, which is what the package makes of an id by itself."""
    module, _, name = given["env"].rpartition(":")
    if module:
        env = getattr(importlib.import_module(module), name)(**given["env_kwargs"])
    else:
        env = gymnasium.make(name, **given["env_kwargs"])
    if isinstance(env.observation_space, spaces.Tuple):
        # It takes no Tuple; choices of a MultiDiscrete are one-hot there as they are with us.
        choices = spaces.MultiDiscrete([int(each.n) for each in env.observation_space])
        env = gymnasium.wrappers.TransformObservation(env, np.array, choices)
    return Monitor(env)


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    algorithm = {"ppo": PPO, "a2c": A2C}[given["algorithm"]]
    model = algorithm(given["policy"], make(given), seed=given["seed"], device="cpu")
    model.learn(given["steps"])
    last = [each["r"] for each in model.ep_info_buffer]
    env = make(given)
    env.reset(seed=1_000_000 + given["seed"])
    played, _ = evaluate_policy(model, env, given["episodes"], deterministic=True)
    training = sum(last) / len(last) if last else None
    print(json.dumps({"training": training, "evaluation": float(played)}))


if __name__ == "__main__":
    main()
