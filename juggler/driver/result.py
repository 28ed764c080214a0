"""How a run ended, for people and for programs."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.record.wording import outcome


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """How a run ended. It prints as five lines, and as a table in a notebook.

    Attributes:
        summary: what `summary.json` holds.
        run_dir: where everything is.
        checkpoint: the newest checkpoint; None where the run made none.
    """

    summary: dict[str, Any]
    run_dir: Path
    checkpoint: Path | None

    @property
    def solved(self) -> bool:
        return bool(self.summary["solved"])

    def __repr__(self) -> str:
        return "\n".join(f"{name:<10} {value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table>{rows}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        checkpoint = "none" if self.checkpoint is None else str(self.checkpoint)
        where = [("run", str(self.run_dir)), ("checkpoint", checkpoint)]
        return [*outcome(self.summary), *where]
