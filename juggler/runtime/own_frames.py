"""The frames of an error that its reader may have written, without those of libraries."""

from __future__ import annotations

import re
from pathlib import Path
from traceback import StackSummary, extract_tb
from types import TracebackType

_LIBRARY = re.compile("/(site|dist)-packages/|/lib/python3")  # in a file's name


def own_frames(traceback: TracebackType | None) -> StackSummary:
    """The frames outside libraries; all of them if there are no others."""
    frames = extract_tb(traceback)
    own = [frame for frame in frames if not _LIBRARY.search(frame.filename)]
    return StackSummary.from_list(own or frames)


def place_of(error: BaseException, beside: Path | None = None) -> str:
    """Where an error was raised, for the end of its message: the innermost line outside libraries,
    if there is one.

    Args:
        error: what was raised.
        beside: a directory whose lines the reader has not written either.
    """
    frames = own_frames(error.__traceback__)
    own = [each for each in frames if not (beside and Path(each.filename).is_relative_to(beside))]
    if not own:
        return ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})"
