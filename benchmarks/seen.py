"""Runs the configurations that ship, and writes their results into the table `seen` of their files.

python benchmarks/seen.py cartpole hopper
python benchmarks/seen.py hopper --seeds 1 --seconds 600
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path
from typing import Any

from commands import cores, processor, train

CONFIGS = Path(__file__).parents[1] / "juggler" / "driver" / "configs"


def seen(name: str, seeds: int, seconds: float, machine: str) -> str:
    """A configuration's table, after runs of its own length, limited to `seconds`."""
    ends: list[dict[str, Any]] = []
    for seed in range(seeds):
        summary, _ = train(name, "--seed", seed, "--stop-seconds", seconds, "--no-confirm")
        ends.append(summary)
        shown = ("solved", "episode_return_mean", "env_steps_trained", "wall_time")
        print(name, "seed", seed, *(f"{key} {summary[key]}" for key in shown), flush=True)
    median = {key: statistics.median(end[key] for end in ends) for key in shown[1:]}
    return (
        "[seen]                  # by benchmarks/seen.py\n"
        f"episode_return = {median['episode_return_mean']:.1f}\n"
        f"env_steps = {median['env_steps_trained']:.0f}\n"
        f"seconds = {median['wall_time']:.1f}\n"
        f"seeds = {seeds}\n"
        f'machine = "{machine}"\n'
    )


def write(name: str, table: str) -> None:
    """Write the table at the end of the configuration's file, replacing an earlier one."""
    file = CONFIGS / f"{name}.toml"
    settings = file.read_text().partition("\n[seen]")[0].rstrip("\n")
    settings = re.sub(r"^seen = .*\n", "", settings, flags=re.M)
    file.write_text(f"{settings}\n\n{table}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", help="names of configurations that ship")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="time limit of a run")
    default = f"{cores()} cores, {processor()}"
    parser.add_argument("--machine", default=default, help="name of this machine")
    options = parser.parse_args()
    for name in options.names:
        write(name, seen(name, options.seeds, options.seconds, options.machine))
