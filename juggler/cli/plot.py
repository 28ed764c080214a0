"""`juggler plot`: draws runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from juggler.cli.arguments import Flag, parse, report_errors


@dataclass(kw_only=True)
class Arguments:
    """Draw return, throughput and staleness of runs, or other metrics, over steps and over time of
    training."""

    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories; their curves are drawn in one picture. Of a directory that `juggler train
    --seeds` has made, the interquartile mean with its 95 % interval is drawn."""

    output: str | None = None
    """File of the picture; none: plot.png in the directory of one run, comparison.png in the
    working directory for several."""

    together: Flag = False
    """Draw the interquartile mean of all runs, with its 95 % interval."""

    by: Literal["auto", "run", "module", "agent"] = "auto"
    """Whose returns are drawn: of each run, the sum over agents; of each module, the mean of one of
    its agents; or of each agent. auto: of one run, those of each module if it has several, or else
    of each agent if it has several; of several runs, their own."""

    metric: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Draw this metric instead, such as policy_loss or info/score/mean; give it again for more. A
    name is a key of metrics.jsonl, or the end of several: each module then has a curve."""

    smooth: int = 1
    """Draw the mean of this many lines of metrics up to each. Evaluations stay as they are."""

    log: Flag = False
    """Draw on logarithmic axes, without the numbers that are not above 0."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "plot")
    return report_errors("plot", lambda: _plot(given))


def _plot(given: Arguments) -> int:
    from juggler.cli.picture import plot

    output = Path(given.output) if given.output else None
    run_dirs = [Path(name) for name in given.run_dirs]
    picture = plot(
        run_dirs,
        output,
        given.by,
        together=given.together,
        metrics=given.metric,
        smooth=given.smooth,
        log=given.log,
    )
    print(f"plot: {picture}")
    return 0
