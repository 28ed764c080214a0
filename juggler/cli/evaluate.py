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
    """Play whole episodes with the policy in a checkpoint, choosing its likeliest actions."""

    checkpoint: tyro.conf.Positional[str]
    """A checkpoint, or a run directory: then its newest good checkpoint."""

    episodes: int = 20
    """How many episodes to play."""

    seed: int = 0
    """Of the environments."""

    env: str | None = None
    """Another environment than the one of the run."""

    video: str | None = None
    """A directory for a video of each episode."""


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
    """A line every few seconds, on stderr: what is printed at the end is for programs, too."""

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
    """A warning in a line of its own, without the line of code that it comes from."""
    print(f"juggler evaluate: {message}", file=sys.stderr)
