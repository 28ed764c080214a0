"""Cores that have nothing to do while a learner is what limits a run."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from juggler.driver.parts import RunParts
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.processor_time import seconds_idle
from juggler.runtime.actors.resources import usable_cores

_BUSY = 0.9  # of the time
#: Updates are told when they are done, so that more work than there was time for may be told at
#: once. What is above this share of it says nothing.
_MOST_BUSY = 1.2
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
        members, cores = parts.core.members, usable_cores()
        devices = {parts.registry.devices[name] for name in members}
        seconds = parts.metrics.workers.seconds().get(LEARNER, {})
        limited = cores < (os.cpu_count() or 1)
        if not parts.only_local or devices != {"cpu"} or limited or not seconds:
            return None
        worked = sum(seconds.get(name, 0.0) for name in _WORK)
        cpu = parts.local.cpu_seconds() + time.process_time()
        return cls(time.monotonic(), len(members), worked, cpu, seconds_idle(), cores)


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
        self._before = used
        if self._told or used is None or before is None or used.learners != before.learners:
            return ""
        seconds = used.time - before.time
        worked = (used.worked - before.worked) / seconds / used.learners
        left = used.cores - (used.cpu - before.cpu) / seconds
        idle = min(left, (used.idle - before.idle) / seconds)
        possible = min(_MOST_THREADS, self._threads + int(idle // used.learners))
        threads = 1 << possible.bit_length() - 1  # a power of 2, as `juggler tune` tries
        if not _BUSY <= worked <= _MOST_BUSY or threads <= self._threads:
            return ""
        self._told = True
        alone = used.learners == 1
        who, they = ("the learner limits", "it") if alone else ("learners limit", "they")
        return (
            f"{who} this run: in the last {seconds:.0f} s {they} waited for "
            f"{max(0.0, 1 - worked):.0%} of the time, and {idle:.1f} of {used.cores:g} cores had "
            f"nothing to do. learner_threads = {threads} may make updates faster: `juggler tune` "
            "measures it"
        )
