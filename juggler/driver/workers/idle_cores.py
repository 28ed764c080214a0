"""Cores that have nothing to do while a learner is what limits a run."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from juggler.driver.parts import RunParts
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.processor_time import seconds_idle
from juggler.runtime.actors.resources import usable_cores

_SECONDS = 20.0  # between two looks
_BUSY = 0.9  # of the time
_EARLY = -0.2
_WORK = ("collate", "update", "publish")
_MOST_THREADS = 8  # that are advised


class Used(NamedTuple):
    """What a run and its host have used so far, in seconds unless it says otherwise.

    Attributes:
        time: of a clock.
        learners: how many there are.
        worked: in which learners had something to do, added up.
        cpu: of processors, that the run has used.
        idle: of processors of this host, in which they had nothing to do.
        cores: how many the run may use.
    """

    time: float
    learners: int
    worked: float
    cpu: float
    idle: float
    cores: float

    @classmethod
    def by(cls, parts: RunParts) -> Used | None:
        """What a run has used; None: its learners are elsewhere, or on GPUs, or not at work yet, or
        the run may not use all cores, so that nobody knows which of them it could have."""
        members = parts.core.members
        devices = {parts.registry.devices[name] for name in members}
        seconds = parts.metrics.workers.seconds().get(LEARNER, {})
        limited = usable_cores() < (os.cpu_count() or 1)
        if not parts.only_local or devices != {"cpu"} or limited or not seconds:
            return None
        worked = sum(seconds.get(name, 0.0) for name in _WORK)
        cpu = parts.local.cpu_seconds() + time.process_time()
        return cls(time.monotonic(), len(members), worked, cpu, seconds_idle(), usable_cores())


class IdleCores:
    """Tells people, once, where learners could compute in more threads.

    Args:
        threads: of each learner.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._before: Used | None = None
        self._told = False

    def look(self, used: Used | None) -> str:
        """What to tell people of the time since the last look, in words; "": nothing."""
        before = self._before
        if self._told or (used and before and used.time - before.time < _SECONDS):
            return ""
        self._before = used
        if used is None or before is None or used.learners != before.learners:
            return ""
        seconds = used.time - before.time
        waited = 1 - (used.worked - before.worked) / seconds / used.learners
        left = used.cores - (used.cpu - before.cpu) / seconds
        idle = min(left, (used.idle - before.idle) / seconds)
        possible = min(_MOST_THREADS, self._threads + int(idle // used.learners))
        threads = 1 << possible.bit_length() - 1  # a power of 2, as `juggler tune` tries
        # Work is told when it is done: long updates may be told at the wrong time.
        if not _EARLY <= waited <= 1 - _BUSY or threads <= self._threads:
            return ""
        self._told = True
        one = used.learners == 1
        return (
            f"{'the learner limits' if one else 'learners limit'} this run: in the last "
            f"{seconds:.0f} s {'it' if one else 'they'} waited for {max(0.0, waited):.0%} of the "
            f"time, and {idle:.1f} of {used.cores:g} cores had nothing to do. learner_threads = "
            f"{threads} may make updates faster: `juggler tune` measures it"
        )
