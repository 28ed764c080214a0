"""Tracebacks with only the user's own frames."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, extract_tb
from types import TracebackType

_LIBRARY = re.compile("/(site|dist)-packages/|/lib/python3")  # in a file's name
_JUGGLER = Path(__file__).parents[1]


def own_frames(traceback: TracebackType | None) -> StackSummary:
    """Return the frames outside libraries, or else all frames."""
    frames = extract_tb(traceback)
    own = [frame for frame in frames if not _LIBRARY.search(frame.filename)]
    return StackSummary.from_list(own or frames)


def place_of(error: BaseException) -> str:
    """Return where an error was raised, for a message's end.

    The innermost line of the user's code, or else the innermost line outside libraries.
    """
    return place_of_readers(error) or _place(own_frames(error.__traceback__))


def place_of_readers(error: BaseException) -> str:
    """Return the innermost line of the user's code, for a message."""
    return _place([each for each in extract_tb(error.__traceback__) if _is_of_reader(each)])


def _place(frames: Sequence[FrameSummary]) -> str:
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})"


def _is_of_juggler(frame: FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(_JUGGLER)


def _is_of_reader(frame: FrameSummary) -> bool:
    return not (_is_of_juggler(frame) or _LIBRARY.search(frame.filename))


def traceback_of(error: BaseException) -> str:
    """Return an error as Python shows it, with Juggler's frames cut.

    If the user's code is among the frames, the only frame of Juggler is one that raised.
    """
    shown = TracebackException.from_exception(error)
    for each in _chain(shown):
        if any(map(_is_of_reader, each.stack)):
            *before, last = each.stack
            kept = [frame for frame in before if not _is_of_juggler(frame)]
            each.stack = StackSummary.from_list([*kept, last])
    return "".join(shown.format())


def _chain(shown: TracebackException) -> Iterator[TracebackException]:
    """Yield an error and its causes."""
    yield shown
    for each in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if each is not None:
            yield from _chain(each)
