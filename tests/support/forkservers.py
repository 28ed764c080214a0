"""The forkserver of this process, whoever started it."""

from __future__ import annotations

from multiprocessing import forkserver
from typing import Any

from juggler.runtime.actors.processes import cool_down


def end_forkserver() -> None:
    """Whoever needs one next starts another one. Nothing may run that this one has started."""
    cool_down()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()  # one that is not Juggler's
