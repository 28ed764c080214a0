"""`juggler runs`: a table of runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from juggler.cli.arguments import Flag, parse, report_errors

if TYPE_CHECKING:
    from juggler.driver.watching.overview import Overview

#: Where runs are that were given no directory.
DEFAULT = "runs"

_PIPE_COLUMNS = 300  # without a terminal, nothing is cut off
_STYLES = {
    "running": "cyan",
    "solved": "green",
    "failed": "bold red",
    "killed": "bold red",
    "stopped": "",
}


@dataclass(kw_only=True)
class Arguments:
    """List runs, the newest first: how each is doing, or how it ended."""

    directory: tyro.conf.Positional[str] = DEFAULT
    """A directory of runs, or a run."""

    json: Flag = False
    """Print one JSON object for each run, a line each."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "runs")
    return report_errors("runs", lambda: _list(given))


def _list(given: Arguments) -> int:
    from juggler.driver.watching.overview import Overseer, find_runs, names_of, to_plain

    directory = Path(given.directory)
    is_there = given.directory != DEFAULT or directory.exists()  # else nobody has trained here yet
    run_dirs = find_runs([directory]) if is_there else []
    found = [
        Overseer(run_dir, name).look()
        for run_dir, name in zip(run_dirs, names_of(run_dirs), strict=True)
    ]
    if given.json:
        for each in found:
            print(json.dumps(to_plain(each)))
    elif found:
        _show(found)
    else:
        print(f"there are no runs in {directory}: `juggler train cartpole` makes one in runs/")
    return 0


def _show(found: list[Overview]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from juggler.driver.record.wording import number, quantity

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "environment", "algorithm", "state"):
        table.add_column(name, overflow="fold", min_width=7)
    for name in ("return", "best", "steps", "time", "checkpoints"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("written", no_wrap=True)
    for each in found:
        table.add_row(
            Text(each.name),
            Text(each.env.rpartition(":")[2]),
            Text(each.algorithm),
            Text(each.state, style=_STYLES[each.state]),
            number(each.return_last),
            number(each.return_best),
            quantity(each.env_steps),
            duration(each.wall_time),
            str(len(each.checkpoints)),
            f"{duration(max(0.0, time.time() - each.written))} ago",
        )
    console.print(table)
    for each in found:
        if each.problem:
            print(f"{each.directory}: {each.problem}", file=sys.stderr)


def duration(seconds: float) -> str:
    """A time as people say it: 8.3 s, 12 min 5 s, 3 h 20 min, 4 days."""
    if seconds < 59.95:  # which is rounded: never 60.0 s
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"
