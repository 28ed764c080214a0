"""Random actions of simulators at a gateway (see tests/gateway/test_fuzzed_sessions.py), in as many
processes as there are processors, until something goes wrong or the time is up.

    python benchmarks/fuzz_sessions.py --seconds 180
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gateway"))

import torch
from test_fuzzed_sessions import Story

EVENTS = 200  # in a story
NAMES = "stories", "messages", "steps", "wrong"  # of counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first story")
    given = parser.parse_args()
    processes = os.cpu_count() or 1
    jobs = [(given.seconds, given.seed + number, processes) for number in range(processes)]
    with multiprocessing.Pool(processes) as pool:
        counts = sum(pool.starmap(_fuzz, jobs), Counter[str]())
    print(json.dumps({name: counts[name] for name in NAMES}))
    if counts["wrong"]:
        raise SystemExit(1)


def _fuzz(seconds: float, seed: int, stride: int) -> Counter[str]:
    """Play the stories with this seed, this seed plus `stride`, and so on."""
    torch.set_num_threads(1)
    counts = Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for wild, several in product((False, True), repeat=2):
            counts["stories"] += 1
            try:
                gateway = Story(seed, wild, several).tell(EVENTS)
                counts["messages"] += gateway.messages
                counts["steps"] += gateway.live
            except Exception:
                counts["wrong"] += 1
                story = f"Story({seed}, {wild}, {several}).tell({EVENTS})"
                print(f"{story}:\n{traceback.format_exc()}")
        seed += stride
    return counts


if __name__ == "__main__":
    main()
