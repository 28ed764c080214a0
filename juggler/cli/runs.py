"""`juggler runs`: a table of runs, or of the checkpoints of one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import tyro

from juggler.cli.arguments import Flag, parse, report_errors

if TYPE_CHECKING:
    from rich.console import Console

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
    """List runs, the newest first: how each is doing, or how it ended. Of a single run, list its
    checkpoints, too."""

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
        console = _console()
        _show(found, console)
        if run_dirs == [directory]:
            _show_checkpoints(directory, console)
    else:
        print(f"there are no runs in {directory}: `juggler train cartpole` makes one in runs/")
    return 0


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)


def _show(found: list[Overview], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from juggler.driver.record.wording import number, quantity

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
            _ago(each.written),
        )
    console.print(table)
    for each in found:
        if each.problem:
            print(f"{each.directory}: {each.problem}", file=sys.stderr)


def _show_checkpoints(run_dir: Path, console: Console) -> None:
    """Those that commands take: the newest ones, and the best one."""
    from rich.table import Table
    from rich.text import Text

    from juggler.driver.record.wording import number, quantity
    from juggler.driver.watching.presentable import text_of
    from juggler.runtime.checkpoints.checkpoint import read_record

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("checkpoint", overflow="fold")
    for name in ("return", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("written", no_wrap=True)
    for path in _checkpoints(run_dir):
        try:
            counters = read_record(path)["counters"]
            returns, steps = counters.get("returns"), quantity(counters["trained"])
            told = number(fmean(returns) if returns else None), steps
            written = _ago(path.stat().st_mtime)
        except Exception:  # the directory may hold anything
            told, written = ("", ""), "damaged"
        table.add_row(Text(text_of(path)), *told, written)
    if table.row_count:
        console.print()
        console.print(table)


def _checkpoints(run_dir: Path) -> Iterator[Path]:
    from juggler.runtime.checkpoints.checkpoint import BEST, DIRECTORY, newest_first

    for name in (DIRECTORY, BEST):
        if (run_dir / name).is_dir():
            yield from newest_first(run_dir / name)


def _ago(then: float) -> str:
    return f"{duration(max(0.0, time.time() - then))} ago"


def duration(seconds: float) -> str:
    """A time as people say it: 8.3 s, 12 min 5 s, 3 h 20 min, 4 days."""
    if seconds < 59.95:  # which is rounded: never 60.0 s
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"
