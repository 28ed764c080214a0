"""The display of a run in a notebook: one line that is written anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from juggler.driver.record.progress import PlainProgress
from juggler.driver.record.wording import conclude, describe, plain


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows what is displayed."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookProgress(PlainProgress):
    """Plain progress whose newest line takes the place of the one before it. Messages stay."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._what = ""

    def start(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._what = f"{describe(config)}\n"

    def message(self, text: str, level: str = "info") -> None:
        self._write(text if level == "info" else f"{level}: {text}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        # Where it is, the result says, which a notebook shows as a table.
        self._print(conclude(summary).partition("\n")[0])

    def _print(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": plain(self._what + text.strip())}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
