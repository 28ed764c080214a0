"""`juggler train --list`: one line for each configuration that ships."""

from __future__ import annotations

from juggler.driver.shipped import Seen, read_shipped, shipped_configs
from juggler.envrunner.environments.extras import extra_for

_HEAD = ("name", "algorithm", "environment", "extra", "return", "steps", "seconds", "seen on")


def listing() -> str:
    """The table as text, with a head; figures are medians over the seeds."""
    rows = [_HEAD, *(_row(name) for name in shipped_configs())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str) -> tuple[str, ...]:
    shipped = read_shipped(name)
    env, algorithm = shipped.config.env_runner.env, shipped.config.learner.algorithm
    about = (name, algorithm, env.rpartition(":")[2], extra_for(env) or "-")
    seen = shipped.seen
    if not isinstance(seen, Seen):
        return *about, "-", "-", "-", seen or "not tried in full"
    reached = f"{seen.episode_return:.1f}", f"{seen.env_steps / 1e3:.0f}k", f"{seen.seconds:.1f}"
    seeds = "seed 0" if seen.seeds == 1 else f"median of seeds 0 to {seen.seeds - 1}"
    return *about, *reached, f"{seen.machine}; {seeds}"
