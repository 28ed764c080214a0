"""`juggler.plot`: draws runs in a notebook."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from juggler.cli.picture import draw
from juggler.cli.picture_runs import By
from juggler.driver.result import Result
from juggler.driver.started import StartedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Picture:
    """Runs as curves: return, throughput and staleness, over steps and over time. A notebook shows
    it.

    Attributes:
        figure: of Matplotlib, to be changed or saved.
    """

    figure: Figure

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.figure.savefig(content, format="png")
        return content.getvalue()


def plot(
    *runs: Result | StartedRun | str | Path,
    by: By = "auto",
    together: bool = False,
    metrics: Sequence[str] = (),
    smooth: int = 1,
    log: bool = False,
) -> Picture:
    """Draw runs into one picture, as `juggler plot` does; also runs that go on.

    Args:
        runs: results, runs that `juggler.start` has returned, or directories of runs.
        by: whose returns are drawn: of each "run", each "module" or each "agent". "auto": of one
            run, those of each module if there are several, else those of each agent if there are
            several; else those of the run.
        together: draw the interquartile mean of all runs, with its 95 % interval.
        metrics: draw these instead, such as "policy_loss" or "info/score/mean".
        smooth: number of metrics lines to average over: each line and the lines before it.
        log: draw on logarithmic axes.

    Raises:
        PlotError: a run has no metrics, no metrics by module or agent although `by` asks for
            them, or no numbers of one of `metrics`.
    """
    given = [run.run_dir if isinstance(run, Result | StartedRun) else Path(run) for run in runs]
    return Picture(draw(given, by, together=together, metrics=metrics, smooth=smooth, log=log))
