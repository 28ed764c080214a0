"""Deadlines are for those who could make progress."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from support.hub_world import World

from juggler.runtime.actors import attachment, busy_threads, connection
from juggler.runtime.actors.busy_threads import BusyThreads
from juggler.runtime.actors.hub_events import Left
from juggler.runtime.actors.processor_time import seconds_used, seconds_waited

_SPIN = "import os, time; os.sched_setaffinity(0, {CPU}); end = time.monotonic() + 60\n"


def test_two_processes_on_one_processor_wait_for_each_other() -> None:
    cpu = str(min(os.sched_getaffinity(0)))
    program = _SPIN.replace("CPU", cpu) + "while time.monotonic() < end: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    try:
        deadline = time.monotonic() + 60
        while min(seconds_waited(each.pid) for each in spinning) < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert seconds_used(each.pid for each in spinning) > 0
    finally:
        for each in spinning:
            each.kill()
            each.wait()
    assert seconds_waited(spinning[0].pid) == 0.0
    assert seconds_used([spinning[0].pid]) == 0.0


@pytest.mark.parametrize("starved", [True, False])
def test_a_silent_worker_that_waits_for_a_processor_is_not_lost(
    world: World, monkeypatch: pytest.MonkeyPatch, starved: bool
) -> None:
    begun = time.monotonic()
    monkeypatch.setattr(connection, "_SILENCE_BEGINS", 0.2)
    monkeypatch.setattr(
        connection, "seconds_waited", lambda _: time.monotonic() - begun if starved else 0.0
    )
    world.start(heartbeat_seconds=0.05, silence_seconds=0.8)
    monkeypatch.setattr(attachment.Attachment, "_beat", lambda _: None)  # its heart does not beat
    silent = world.attach(local=True)
    time.sleep(2.5)
    left = [event for event in world.events.gather() if isinstance(event, Left)]
    assert bool(left) is not starved
    silent.close()


@pytest.mark.parametrize("starved", [True, False])
def test_a_busy_thread_that_waits_for_a_processor_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, starved: bool
) -> None:
    begun = time.monotonic()
    monkeypatch.setattr(
        busy_threads, "thread_waited", lambda *_: time.monotonic() - begun if starved else 0.0
    )
    threads = BusyThreads()
    with threads.busy():
        threads.longest()
        time.sleep(0.5)
        stuck, thread = threads.longest()
    assert starved or thread == threading.get_ident()
    assert (stuck < 0.25) is starved
    assert threads.longest() == (0.0, 0)
