"""A large league on one machine: how often each player is trained, and the cost.

    python benchmarks/league_scale.py
    python benchmarks/league_scale.py --seconds 300 --devices fake:8

The twelve players of the league alphastar learn rock, paper, scissors, whose matches are as
short as any, until there are 30 copies, and for some seconds from then on. For these seconds:
updates of each player, memory of the processes, and the driver's CPU time for each match.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from commands import environment, table

LEAGUE = {
    "builder": "alphastar",
    "max_historical": 30,
    "options": {"min_phase_steps": 1_000, "max_phase_steps": 2_000},
}
OPTIONS = {
    "env": "juggler:MatrixGame",
    "algorithm": "ppo",
    "num-env-runners": 1,
    "envs-per-runner": 32,
    "fragment-steps": 16,
    "batch-size": 64,
    "epochs": 1,
    "minibatches": 1,
    "stop-steps": 100_000_000,
}


def newest(run: Path) -> dict[str, Any]:
    """The newest line of metrics."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if run.exists() else []
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return found


def matches(run: Path) -> int:
    """All that were ever played, which are episodes."""
    return int(newest(run).get("episodes", 0))


def watched(process: subprocess.Popen[bytes], run: Path, said: argparse.Namespace) -> None:
    driver = psutil.Process(process.pid)
    started = time.monotonic()
    while newest(run).get("league", {}).get("historical", 0) < LEAGUE["max_historical"]:
        if process.poll() is not None or time.monotonic() - started > said.patience:
            raise SystemExit(f"no 30 copies after {said.patience} s: see {run}")
        time.sleep(1)
    grown = time.monotonic() - started
    before, cpu, played = newest(run), sum(driver.cpu_times()[:2]), matches(run)
    time.sleep(said.seconds)
    after, cpu = newest(run), sum(driver.cpu_times()[:2]) - cpu
    played = matches(run) - played
    memory = {child.name(): child.memory_info().rss for child in driver.children(recursive=True)}
    updates = {
        player: of["updates"] - before["by_module"][player]["updates"]
        for player, of in after["by_module"].items()
        if "updates" in of
    }
    rows = [[player, str(count)] for player, count in sorted(updates.items())]
    print(table(f"updates in {said.seconds} s", ["player", "updates"], rows))
    of_kind: dict[str, list[int]] = {}
    for player, count in updates.items():
        of_kind.setdefault(player.rpartition("-")[0], []).append(count)
    told = {
        "seconds_to_30_copies": round(grown, 1),
        "matches_per_second": round(played / said.seconds, 1),
        "driver_milliseconds_per_match": round(1000 * cpu / max(played, 1), 3),
        "driver_MiB": driver.memory_info().rss >> 20,
        "largest_process_MiB": max(memory.values()) >> 20,
        "processes": 1 + len(memory),
        "updates_per_second": {
            player: round(count / said.seconds, 1) for player, count in sorted(updates.items())
        },
        "slowest_to_fastest": {
            kind: round(min(counts) / max(counts), 2) for kind, counts in of_kind.items()
        },
    }
    print(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--patience", type=int, default=400, help="seconds until there are copies")
    parser.add_argument("--devices", default="fake:4")
    said = parser.parse_args()
    run = Path(tempfile.mkdtemp(prefix="league-scale-")) / "run"
    command = [sys.executable, "-m", "juggler", "train", "--league", json.dumps(LEAGUE)]
    for key, value in {**OPTIONS, "devices": said.devices, "run-dir": run}.items():
        command += [f"--{key}", str(value)]
    process = subprocess.Popen([*command, "--progress", "off"], env=environment())
    try:
        watched(process, run, said)
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
