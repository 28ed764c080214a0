"""What heartbeats tell of a worker, and how long its answers take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.hub_world import World

from juggler.runtime.actors.histogram import Histogram
from juggler.runtime.actors.hub_events import Joined, Replied
from juggler.runtime.actors.memory import resident_bytes
from juggler.runtime.actors.requests import RequestPool
from juggler.runtime.wire.v1 import attach_pb2


def test_a_hub_knows_when_it_heard_a_worker_and_how_much_memory_it_has(world: World) -> None:
    world.start(heartbeat_seconds=0.05)
    attachment = world.attach()
    attachment.device_bytes = lambda: 123
    deadline = time.monotonic() + 10
    while not (vitals := world.hub.vitals()) or not vitals["worker-0"].device_bytes:
        assert time.monotonic() < deadline, vitals
        time.sleep(0.02)
    (vital,) = vitals.values()
    assert vital.device_bytes == 123
    assert vital.seconds_silent < 5
    assert 0 < vital.cpu_seconds <= time.process_time()
    assert vital.resident_bytes == pytest.approx(resident_bytes(), rel=0.5)


def test_memory_of_a_process_is_that_of_its_pages() -> None:
    pages = int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) * 1024
    assert resident_bytes() == pytest.approx(pages, rel=0.2)


def test_a_histogram_counts_by_upper_bounds() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.1, 100):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 2]
    assert histogram.sum == pytest.approx(114.6)


def test_a_pool_measures_the_commands_that_it_is_told_to(world: World) -> None:
    world.start()
    histogram = Histogram((0.0, 60.0))
    pool = RequestPool(world.hub, latencies={attach_pb2.Stop: histogram})
    attachment = world.attach()
    joined = world.wait_for(Joined)
    pool.complete(joined)
    for command in (attach_pb2.Stop(), attach_pb2.Done()):
        command_id = pool.submit(joined.worker, command)
        attachment.reply(command_id, attach_pb2.Done(), last=False)
        attachment.reply(command_id, attach_pb2.Done())
        for _ in range(2):
            assert len(pool.complete(world.wait_for(Replied))) == 1
    assert histogram.counts == [0, 1, 0], "one command of that kind, once"
    assert histogram.sum > 0
