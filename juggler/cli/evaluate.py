"""`juggler evaluate`: plays with the policy in a checkpoint."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import tyro

from juggler.cli.arguments import parse, report_errors

PROGRESS_SECONDS = 5.0


@dataclass(kw_only=True)
class Arguments:
    """Play whole episodes with the policy in a checkpoint, always with its most likely actions."""

    checkpoint: tyro.conf.Positional[str]
    """A checkpoint, or a run directory, whose newest good checkpoint is taken."""

    episodes: int = 20
    """How many episodes to play."""

    seed: int = 0
    """Seed of the environments."""

    env: str | None = None
    """An environment to play instead of the run's."""

    video: str | None = None
    """A directory for one video of each episode."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "evaluate")
    return report_errors("evaluate", lambda: _evaluate(given))


def _evaluate(given: Arguments) -> int:
    from juggler.driver.evaluating import evaluate

    with warnings.catch_warnings():
        warnings.showwarning = _show
        played = evaluate(
            given.checkpoint,
            given.episodes,
            given.seed,
            env=given.env,
            video=given.video,
            watch=_Progress(given.episodes),
        )
    print(f"checkpoint: {played.checkpoint}")
    print(
        f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f} "
        f"(least {min(played.returns):.1f}, most {max(played.returns):.1f}), "
        f"mean length {sum(played.lengths) / len(played.lengths):.1f}"
    )
    if played.videos:
        print(f"videos: {given.video}, {len(played.videos)} of them")
    return 0


class _Progress:
    """Prints a line every few seconds on stderr, because stdout is for programs, too."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._said = time.monotonic()

    def __call__(self, ended: int, steps: int) -> None:
        if ended == self._episodes or time.monotonic() - self._said < PROGRESS_SECONDS:
            return
        self._said = time.monotonic()
        print(f"{ended} of {self._episodes} episodes, {steps} steps of each", file=sys.stderr)


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning on one line, without the code that it comes from."""
    print(f"juggler evaluate: {message}", file=sys.stderr)
