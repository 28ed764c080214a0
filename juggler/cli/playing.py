"""What the commands that play whole episodes tell people."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from juggler.driver.record.episode_returns import WithReturns

PROGRESS_SECONDS = 5.0


class Progress:
    """Prints a line every few seconds on stderr, because stdout is for programs, too.

    Args:
        total: how many episodes will be played.
        noun: what they are called.
    """

    def __init__(self, total: int, noun: str = "episodes") -> None:
        self._total, self._noun = total, noun
        self._said = time.monotonic()

    def __call__(self, ended: int, steps: int = 0) -> None:
        if ended == self._total or time.monotonic() - self._said < PROGRESS_SECONDS:
            return
        self._said = time.monotonic()
        step = f", step {steps}" if steps else ""
        print(f"{ended} of {self._total} {self._noun}{step}", file=sys.stderr)


@contextmanager
def warnings_told(command: str) -> Iterator[None]:
    """Print each warning on one line of stderr, without the code that it comes from."""

    def tell(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print(f"juggler {command}: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = tell
        yield


@contextmanager
def stdout_kept(for_json: bool) -> Iterator[None]:
    """Redirect prints, also of C code, to stderr: stdout has only JSON."""
    if not for_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # the buffer of C code
        os.dup2(kept, 1)
        os.close(kept)


def in_words(played: WithReturns) -> str:
    """How many episodes were played, and their returns."""
    if len(played.returns) == 1:
        return f"1 episode: return {played.mean:.1f}"
    return (
        f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f} "
        f"(standard deviation; least {min(played.returns):.1f}, most {max(played.returns):.1f})"
    )
