"""Tables of a sweep's trials, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from juggler.driver.record.wording import number
from juggler.experiments.sweep_directory import SweepPlan
from juggler.experiments.trials import TrialOver

_MOST_ROWS = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A trial that goes on: the number of its run, how much of it is done, from 0 to 1, what it is
    compared by, and its settings."""

    number: int
    share: float
    value: float | None
    settings: Mapping[str, Any]


def settings_text(settings: Mapping[str, Any]) -> str:
    """Word settings in a line: "lr=0.00123 entropy_coefficient=0"."""
    return " ".join(f"{key}={_short(value)}" for key, value in settings.items())


def trial_line(
    number_of_run: int, metric: str, value: float | None, said: str, settings: Mapping[str, Any]
) -> str:
    """Word how a trial ended."""
    how = f"  {said}" if said else ""
    measured = "" if value is None else f"  {metric} {number(value)}"
    return f"trial {number_of_run:>3}{measured}  {settings_text(settings)}{how}"


def progress_table(
    over: Sequence[TrialOver], running: Sequence[Row], plan: SweepPlan, stopping: bool
) -> Table:
    """The trials that go on, and how many are over."""
    title = f"sweep: {len(over)} of {plan.trials} trials are over"
    if stopping:
        title += ", those that go on are ending (Ctrl-C again kills them)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("trial", justify="right")
    table.add_column("", width=16)
    table.add_column(plan.metric, justify="right")
    table.add_column("settings", overflow="fold")
    for row in running:
        bar = ProgressBar(total=1.0, completed=row.share, width=16)
        table.add_row(f"{row.number}", bar, number(row.value), settings_text(row.settings))
    if over and over[0].complete:
        best = over[0]
        table.add_row(
            f"{best.number}", "best so far", number(best.value), settings_text(best.settings)
        )
    return table


def counts(over: Sequence[TrialOver]) -> str:
    """Word how trials ended."""
    pruned = sum(each.said.startswith("pruned") for each in over)
    complete = sum(each.complete for each in over)
    failed = len(over) - complete - pruned
    return f"{complete} trials complete, {pruned} pruned, {failed} failed"


def result_table(over: Sequence[TrialOver], plan: SweepPlan) -> Table:
    """The best trials, with a column for each key of the space."""
    table = Table(box=None, pad_edge=False)
    table.add_column("trial", justify="right")
    table.add_column(plan.metric, justify="right")
    for key in plan.space:
        table.add_column(key, justify="right", overflow="fold")
    table.add_column("", overflow="fold")
    for each in over[:_MOST_ROWS]:
        shown = [_short(each.settings.get(key, "-")) for key in plan.space]
        table.add_row(f"{each.number}", number(each.value), *shown, Text(each.said, style="dim"))
    if len(over) > _MOST_ROWS:
        table.caption = f"and {len(over) - _MOST_ROWS} more: trials.csv has all of them"
        table.caption_justify = "left"
    return table


def rows_for_csv(over: Sequence[TrialOver], plan: SweepPlan) -> list[dict[str, Any]]:
    """A row for each trial, in the order of their runs."""
    return [
        {
            "trial": each.number,
            plan.metric: each.value,
            **{key: each.settings.get(key) for key in plan.space},
            "ended": each.said or "complete",
        }
        for each in sorted(over, key=lambda each: each.number)
    ]


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
