"""Tracebacks for authors: their own frames without the library's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, extract_tb
from types import TracebackType

_LIBRARY = re.compile("/(site|dist)-packages/|/lib/python3")  # in a file's name
_JUGGLER = Path(__file__).parents[1]


def own_frames(traceback: TracebackType | None) -> StackSummary:
    """The frames outside libraries; all of them if there are no others."""
    frames = extract_tb(traceback)
    own = [frame for frame in frames if not _LIBRARY.search(frame.filename)]
    return StackSummary.from_list(own or frames)


def place_of(error: BaseException) -> str:
    """Place where an error was raised, for a message's end.

    It is the innermost line of the reader's code, or else the innermost one outside libraries.
    """
    return place_of_readers(error) or _place(own_frames(error.__traceback__))


def place_of_readers(error: BaseException) -> str:
    """The innermost line of the reader's code, for a message; or ""."""
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
    """An error as Python shows it, with Juggler's frames cut.

    Where the reader's code is among the frames, runs of Juggler's frames are one line, but for the
    frame that raised.
    """
    shown = TracebackException.from_exception(error)
    for each in _chain(shown):
        each.stack = _shortened(each.stack)
    return "".join(shown.format())


def _chain(shown: TracebackException) -> Iterator[TracebackException]:
    """An error, and its causes."""
    yield shown
    for each in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if each is not None:
            yield from _chain(each)


def _shortened(stack: StackSummary) -> StackSummary:
    if not any(map(_is_of_reader, stack)):
        return stack
    return _Shortened(_without(stack, _is_of_juggler))


def _without(
    stack: StackSummary, is_left_out: Callable[[FrameSummary], bool]
) -> Iterator[FrameSummary]:
    for left_out, frames in groupby(stack[:-1], is_left_out):
        if left_out:
            *before, last = frames
            yield _Calls(last, len(before) + 1)
        else:
            yield from frames
    yield stack[-1]


class _Calls(FrameSummary):
    """Frames of Juggler, one after the other."""

    def __init__(self, last: FrameSummary, count: int) -> None:
        super().__init__(last.filename, last.lineno, last.name, lookup_line=False)
        self.count = count


class _Shortened(StackSummary):
    def format_frame_summary(self, frame_summary: FrameSummary) -> str:
        if not isinstance(frame_summary, _Calls):
            return super().format_frame_summary(frame_summary)
        place = f"{Path(frame_summary.filename).relative_to(_JUGGLER)}, line {frame_summary.lineno}"
        calls = "a call" if frame_summary.count == 1 else f"{frame_summary.count} calls"
        return f"  [{calls} in Juggler, to {place}, in {frame_summary.name}]\n"
