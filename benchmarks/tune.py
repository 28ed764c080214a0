"""What the advice of `juggler tune` is worth: runs as configured and as advised, in turns.

For CartPole with few environments, and for a CartPole whose steps wait 2 ms, as those of simulators
elsewhere do. Prints one JSON line for each: trained steps a second of both runs of each pair, and
what `juggler tune` expected of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
from commands import HERE, environment, steady_rate, train

CASES = {
    "cartpole": ("--num-env-runners", "1", "--envs-per-runner", "4"),
    "waiting": (
        *("--env", "tune:WaitingCartPole", "--num-env-runners", "1", "--envs-per-runner", "4"),
        *("--batch-size", "512"),
    ),
}


class WaitingCartPole(gymnasium.Wrapper):  # type: ignore[type-arg]
    """CartPole with 2 ms in each step that take no processor."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return self.env.step(action)


def _tuned(options: tuple[str, ...], seconds: float, file: Path) -> list[int]:
    """Write the advised configuration; returns the expected steps/s as configured and advised."""
    command = [sys.executable, "-m", "juggler", "tune", "cartpole", *options]
    command += ["--seconds", str(seconds), "--write", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise RuntimeError(done.stderr)
    print(done.stdout, file=sys.stderr)
    return [int(each.replace(",", "")) for each in re.findall(r"about ([\d,]+)", done.stdout)][:2]


def _rate(*options: object, seconds: float) -> float:
    endless = ("--stop-return", 501, "--no-confirm", "--stop-seconds", seconds)
    return steady_rate(train(*options, *endless)[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    given = parser.parse_args()
    os.chdir(HERE)  # where the environment of this file is found
    for case in given.cases:
        with tempfile.TemporaryDirectory(prefix="jb-") as directory:
            file = Path(directory) / "advised.toml"
            told = _tuned(CASES[case], 30.0, file)
            before, after = [], []
            for _ in range(given.pairs):
                before.append(_rate("cartpole", *CASES[case], seconds=given.seconds))
                after.append(_rate(file, seconds=given.seconds))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        found = {"case": case, "expected": told, "before": before, "after": after}
        print(json.dumps({**found, "ratio": statistics.median(ratios)}), flush=True)


if __name__ == "__main__":
    main()
