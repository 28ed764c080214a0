"""Directories of runs that nobody has trained."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

CONFIG = 'env = "CartPole-v1"\nalgorithm = "impala"\nstop_return = 475.0\n'


def line(
    steps: int, mean: float | None, wall_time: float | None = None, **more: Any
) -> dict[str, Any]:
    """A line of metrics."""
    wall = steps / 100 if wall_time is None else wall_time
    told = {"env_steps_sampled": steps, "env_steps_trained": steps, "wall_time": wall}
    return {**told, "episode_return_mean": mean, **more}


def append(run_dir: Path, *lines: dict[str, Any]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in lines))


def made(
    run_dir: Path,
    lines: list[dict[str, Any]],
    summary: dict[str, Any] | None = None,
    *,
    old: float = 100.0,
) -> Path:
    """The directory of a run that wrote so many seconds ago."""
    (run_dir / "checkpoints" / "000000007").mkdir(parents=True)
    (run_dir / "config.toml").write_text(CONFIG)
    append(run_dir, *lines)
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    for number, name in enumerate(("config.toml", "metrics.jsonl", "summary.json")):
        if (run_dir / name).exists():
            then = time.time() - old + number
            os.utime(run_dir / name, (then, then))
    return run_dir
