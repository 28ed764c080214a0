"""The cost of a module's specs after its first call, and if every call checks them.

Compares an RLModule with a plain torch module of the same two layers, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from juggler.runtime.modules.rl_module import RLModule

ROWS = 64
OBSERVATIONS = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(2)


class WithSpecs(RLModule):
    """A minimal RLModule."""

    def __init__(self) -> None:
        super().__init__(OBSERVATIONS, ACTIONS, {})
        self.policy = torch.nn.Linear(4, 2)

    def _forward_exploration(self, batch: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.policy(batch["observations"])}


class Bare(torch.nn.Module):
    """The same without specs."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = torch.nn.Linear(4, 2)

    def forward_exploration(self, batch: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.policy(batch["observations"])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bare, first_call_only, every_call = Bare(), WithSpecs(), WithSpecs()
    every_call.check_specs = True
    passes: dict[str, Callable[[Any], Any]] = {
        "bare": bare.forward_exploration,
        "with_specs": first_call_only.forward_exploration,
        "checked_in_every_call": every_call.forward_exploration,
    }
    batch = {"observations": torch.zeros(ROWS, 4)}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    with torch.inference_mode():
        for _ in range(given.rounds):
            for name, forward in passes.items():
                timer = timeit.Timer("forward(batch)", globals={"forward": forward, "batch": batch})
                seconds[name].append(timer.timeit(given.calls) / given.calls)
    nanoseconds = {name: 1e9 * min(times) for name, times in seconds.items()}
    costs = {
        name: 1e9
        * statistics.median(
            mine - its for mine, its in zip(seconds[name], seconds["bare"], strict=True)
        )
        for name in ("with_specs", "checked_in_every_call")
    }
    print(json.dumps({"nanoseconds_per_call": nanoseconds, "more_than_bare": costs}))


if __name__ == "__main__":
    main()
