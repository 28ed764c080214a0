"""Runs commands in turn, and reads the results of Juggler's runs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def script(name: str, *options: object) -> dict[str, Any]:
    """Run a script of this directory; returns the JSON object that it prints last."""
    command = [sys.executable, str(HERE / name), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def train(*options: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run `juggler train OPTIONS`; returns its summary and its metrics lines."""
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        run_dir = Path(directory, "run")
        command = [sys.executable, "-m", "juggler", "train", *map(str, options)]
        command += ["--run-dir", str(run_dir), "--progress", "off"]
        subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
        summary = json.loads((run_dir / "summary.json").read_text())
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return summary, lines


def trained_run(config: str, seed: int, options: Sequence[str] = ()) -> Path:
    """Train one seed of a configuration, or with options alone if it is ""; returns the directory
    of its run, which stays."""
    run_dir = Path(tempfile.mkdtemp(prefix="jb-")) / "run"
    command = [sys.executable, "-m", "juggler", "train", *([config] if config else [])]
    command += ["--seed", str(seed), *options]
    command += ["--run-dir", str(run_dir), "--progress", "off"]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    return run_dir


def steady_rate(lines: list[dict[str, Any]], after: float = 2.0) -> float:
    """Trained steps per second from `after` seconds after the first update to the last line."""
    trained = [line for line in lines if line["env_steps_trained"]]
    begin = next(line for line in trained if line["wall_time"] >= trained[0]["wall_time"] + after)
    end = lines[-1]
    steps = end["env_steps_trained"] - begin["env_steps_trained"]
    return steps / (end["wall_time"] - begin["wall_time"])


def pairs(
    ours: Callable[[], float], theirs: Callable[[], float], count: int
) -> tuple[float, float, list[float]]:
    """Alternate runs; returns (our median, their median, the ratios pair by pair)."""
    first, second = [], []
    for _ in range(count):
        second.append(theirs())
        first.append(ours())
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return statistics.median(first), statistics.median(second), ratios


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table under a title."""
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |"]
    lines.append("|" + " --- |" * len(head))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def machine() -> str:
    import torch

    python = platform.python_version()
    return f"{cores()} cores of {processor()}, Python {python}, torch {torch.__version__}"


def cores() -> int:
    return len(os.sched_getaffinity(0))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
