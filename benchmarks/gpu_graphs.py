"""Updates with and without CUDA graphs, by algorithm. Prints one JSON object: by setting, the
microseconds of an optimizer step of either kind, and the ratios of blocks that took turns.

python benchmarks/gpu_graphs.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu_feed import ACTIONS, FRAMES, image_batch
from gymnasium import spaces
from updates import SETTINGS, ours

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.process.learner_program import devices_here
from juggler.runtime.episodes.batch import EpisodeBatch

DEVICE = devices_here()[0]
#: Optimizer steps in an update of PPO.
PASSES = {"epochs": 4, "minibatches": 8}


def vector_batch(rows: int, steps: int, seed: int = 0) -> EpisodeBatch:
    """Random steps in CartPole's spaces, in the middle of episodes."""
    columns = image_batch(rows, steps, seed).to_tree()
    rng = np.random.default_rng(seed)
    columns["observations"] = rng.standard_normal((rows, steps, 4), np.float32)
    columns["last_observations"] = rng.standard_normal((rows, 4), np.float32)
    columns["final_observations"] = np.zeros((0, 4), np.float32)
    columns["actions"] = rng.integers(0, 2, (rows, steps))
    columns["action_logp"] = np.full((rows, steps), -np.log(2), np.float32)
    return EpisodeBatch.from_tree(columns)


def on_policy(keys: dict[str, Any], images: bool, rows: int) -> Callable[..., Callable[[], None]]:
    """Makes updates on a sample that is on the device already."""

    def make(*, traced: bool) -> Callable[[], None]:
        if images:
            seen, acted, model = FRAMES, ACTIONS, {"encoder": "nature_cnn"}
        else:
            seen = spaces.Box(-10, 10, (4,), np.float32)
            acted, model = spaces.Discrete(2), {"hidden_sizes": [64, 64]}
        learner = build_learner(keys, None, seen, acted, model, device=DEVICE)
        if not traced:
            learner.core._traces = None  # type: ignore[attr-defined]
        batch = (image_batch if images else vector_batch)(rows, 32)
        sample = learner.sample_from_episodes([batch])

        def update() -> None:
            learner.step(sample)

        return update

    return make


def off_policy(name: str) -> Callable[..., Callable[[], None]]:
    setting = {**SETTINGS[name], "device": DEVICE}
    return lambda *, traced: ours(setting, traced=traced)


#: What makes an update, and its optimizer steps.
MADE: dict[str, tuple[Callable[..., Callable[[], None]], int]] = {
    "dqn, 256 of 4 numbers": (off_policy("dqn"), 32),
    "sac, 256 of 17 numbers": (off_policy("sac"), 32),
    "td3, 256 of 17 numbers": (off_policy("td3"), 32),
    "impala, 512 steps of 4 numbers": (on_policy({"algorithm": "impala"}, False, 16), 1),
    "ppo, 2,048 steps of 4 numbers": (on_policy({"algorithm": "ppo", **PASSES}, False, 64), 32),
    "impala, 512 images": (on_policy({"algorithm": "impala"}, True, 16), 1),
    "ppo, 1,024 images": (on_policy({"algorithm": "ppo", **PASSES}, True, 32), 32),
}


def wait() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def seconds(update: Callable[[], None], steps: int, least: float) -> float:
    """Time of one optimizer step, over at least this many seconds."""
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + least:
        update()
        wait()  # as metrics do
        count += steps
    return (time.perf_counter() - started) / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--least", type=float, default=0.5, help="seconds of a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(MADE))
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in given.only:
        make, steps = MADE[name]
        plain, traced = make(traced=False), make(traced=True)
        for update in (plain, traced):
            for _ in range(max(3, 60 // steps + 2) if steps > 1 else 60):
                update()
        pairs = [
            [seconds(each, steps, given.least) for each in (plain, traced)]
            for _ in range(given.rounds)
        ]
        ratios = [one / other for one, other in pairs]
        found[name] = {
            "plain_us": statistics.median(one for one, _ in pairs) * 1e6,
            "graph_us": statistics.median(other for _, other in pairs) * 1e6,
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
        print(name, found[name], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
