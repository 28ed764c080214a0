"""DQN, SAC and TD3 of Stable-Baselines3 beside ours, in `updates.py`, with its own Python.

Called with "sb3" and one JSON object as `updates.py` makes it. Answers each line of standard input,
a number of arrivals, with the microseconds that an optimizer step took: transitions arrive, and as
many optimizer steps follow. The time is that of the CPU, or with a GPU that of a clock.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter, process_time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.logger import configure

torch.set_num_threads(1)


class Blank(gymnasium.Env[Any, Any]):
    """Has the spaces, and is never played."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.observation_space = spaces.Box(-10, 10, (setting["observed"],), np.float32)
        self.action_space = (
            spaces.Discrete(setting["choices"])
            if setting["choices"]
            else spaces.Box(-1, 1, (setting["acted"],), np.float32)
        )


def clock(device: str) -> float:
    """Seconds of CPU, or of a clock once a GPU is done."""
    if device == "cpu":
        return process_time()
    torch.cuda.synchronize()
    return perf_counter()


def main(setting: dict[str, Any]) -> None:
    keys: dict[str, Any] = {
        "learning_rate": setting["lr"],
        "buffer_size": setting["capacity"],
        "batch_size": setting["batch"],
        "gamma": 0.99,
        "policy_kwargs": {"net_arch": setting["hidden"]},
        "seed": 0,
        "device": setting["device"],
    }
    if setting["choices"]:
        # Its target network is copied within `learn`, which is not measured here.
        model: Any = DQN("MlpPolicy", Blank(setting), max_grad_norm=10, **keys)
    else:
        kind = SAC if setting["algorithm"] == "sac" else TD3
        model = kind("MlpPolicy", Blank(setting), tau=0.005, **keys)
    model.set_logger(configure(None, []))
    generator = np.random.default_rng(0)

    def arrive(count: int) -> None:
        for _ in range(count):
            seen = generator.normal(size=(2, 1, setting["observed"])).astype(np.float32)
            if setting["choices"]:
                action = generator.integers(setting["choices"], size=(1, 1))
            else:
                action = generator.uniform(-1, 1, (1, setting["acted"])).astype(np.float32)
            reward = generator.normal(size=1).astype(np.float32)
            model.replay_buffer.add(seen[0], seen[1], action, reward, np.zeros(1), [{}])

    arrive(setting["begin"])
    together = setting["together"]
    print("ready", flush=True)
    for line in sys.stdin:
        started = clock(setting["device"])
        for _ in range(int(line)):
            arrive(together)
            model.train(gradient_steps=together, batch_size=setting["batch"])
        print((clock(setting["device"]) - started) / int(line) / together * 1e6, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
