"""The forkserver of this process, whoever started it."""

from __future__ import annotations

from multiprocessing import forkserver
from typing import Any

from juggler.runtime.actors import processes


def end_forkserver() -> None:
    """Whoever needs one next starts another one. Nothing may run that this one has started."""
    processes.cool_down()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()  # one that is not Juggler's


def have_jugglers_forkserver() -> None:
    """Start it, unless it is there. That of environments of a test before has no torch, which each
    worker would import anew."""
    if not processes._is_ours():
        end_forkserver()
    processes.warm_up()
    # It answers once it has imported what workers need.
    process = processes.start(processes.WorkerProgram("time:sleep", 0.0), "warm")
    process.join()
    processes.ended(process)
