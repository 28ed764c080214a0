"""Shows people how several runs stand: a table in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from juggler.driver.record.progress import is_capable
from juggler.driver.record.wording import plain

_WIDTH = 120  # of tables, where there is no terminal
_LINE_SECONDS = 5.0  # between lines, likewise


class Board:
    """A table at the foot of the terminal, with messages above it.

    Args:
        kind: the key `progress` of the runs: "off" shows nothing, "plain" and "json" no table.
    """

    def __init__(self, kind: Literal["auto", "live", "plain", "json", "off"]) -> None:
        is_live = kind == "live" or (kind == "auto" and is_capable(sys.stdout))
        self._off = kind == "off"
        self._line_due = 0.0
        self._console = Console(highlight=False, width=None if is_live else _WIDTH)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if is_live else None
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The table is there meanwhile."""
        if self._live is None:
            yield
            return
        with self._live:
            yield

    @contextmanager
    def interruptible(self, going_on: str) -> Iterator[None]:
        """Tell people how to go on after Ctrl-C or SIGTERM, which come out all the same.

        Args:
            going_on: the command.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as end:
            self.say(f"interrupted; to go on: {going_on}")
            end.result = None  # type: ignore[union-attr]  # it ended in order, and has said so
            raise

    def show(self, table: Callable[[], RenderableType], line: Callable[[], str] = str) -> None:
        """Show a table in place of the last one, where there is a terminal; elsewhere a line, every
        few seconds, unless it is empty."""
        if self._live is not None:
            self._live.update(table(), refresh=True)
        elif time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + _LINE_SECONDS
            if text := line():
                self.say(text)

    def say(self, text: str, style: str = "") -> None:
        """Show a message that stays."""
        if not self._off:
            self._console.print(Text(plain(text), style=style), soft_wrap=True)

    def leave(self, table: RenderableType) -> None:
        """Show a table that stays."""
        if not self._off:
            self._console.print(table)
