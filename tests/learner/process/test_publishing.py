"""Weights that leave beside updates: which versions come out, and in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_streams import PATIENCE, FakeDevice

from juggler.learner.process.overlap import Publishing, SideStream
from juggler.runtime.episodes.version import Version

CPU = torch.device("cpu")


class Publisher:
    """Notes what it gets; busy as long as `free` is not set."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.begun: list[Version] = []
        self.published: list[tuple[Version, Any]] = []
        self.failure: Exception | None = None

    def publish(self, version: Version, tree: Any) -> None:
        self.begun.append(version)
        assert self.free.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        self.published.append((version, tree))

    @property
    def versions(self) -> list[Version]:
        return [version for version, _ in self.published]


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def params(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"weight": torch.full((2,), value)}


@pytest.fixture
def publisher() -> Publisher:
    return Publisher()


@pytest.fixture
def publishing(publisher: Publisher) -> Iterator[Publishing]:
    made = Publishing(publisher.publish, SideStream(CPU))
    yield made
    publisher.free.set()
    made.close()


def test_weights_come_out_as_arrays(publisher: Publisher, publishing: Publishing) -> None:
    publishing.offer(Version(1, 1), params(2.0))
    eventually(lambda: publisher.published)
    ((version, tree),) = publisher.published
    assert version == (1, 1)
    np.testing.assert_array_equal(tree["weight"], np.float32([2, 2]))


def test_a_publisher_that_is_behind_skips_to_the_newest(
    publisher: Publisher, publishing: Publishing
) -> None:
    publisher.free.clear()
    publishing.offer(Version(1, 1), params(1.0))
    eventually(lambda: publisher.begun)
    started = time.monotonic()
    for update in range(2, 100):
        publishing.offer(Version(1, update), params(update))
    assert time.monotonic() - started < PATIENCE / 4, "who offers waits for nobody"
    publisher.free.set()
    eventually(lambda: len(publisher.published) == 2)
    assert publisher.versions == [(1, 1), (1, 99)]
    assert publisher.published[1][1]["weight"][0] == 99


def test_versions_of_a_new_generation_come_after_those_of_the_old_one(
    publisher: Publisher, publishing: Publishing
) -> None:
    publisher.free.clear()
    publishing.offer(Version(1, 7), params(1.0))
    eventually(lambda: publisher.begun)
    publishing.offer(Version(1, 8), params(2.0))
    publishing.offer(Version(2, 7), params(1.0))
    publisher.free.set()
    eventually(lambda: len(publisher.published) == 2)
    assert publisher.versions == [(1, 7), (2, 7)]


def test_a_version_that_cannot_be_published_fails_the_next_one(
    publisher: Publisher, publishing: Publishing
) -> None:
    publisher.failure = ValueError("no room")
    publishing.offer(Version(1, 1), params(1.0))
    eventually(lambda: not publishing._thread.is_alive())
    with pytest.raises(ValueError, match="no room"):
        publishing.offer(Version(1, 2), params(1.0))


def test_weights_are_copied_behind_their_update_and_sent_when_they_are_there(
    publisher: Publisher,
) -> None:
    device = FakeDevice()
    device.slow = True
    publishing = Publishing(publisher.publish, SideStream(CPU, device))
    publishing.offer(Version(1, 1), params(1.0))
    eventually(lambda: device.awaited)
    made, copied = device.events
    assert made.stream is device.main
    assert copied.stream.waited_for == [made], "the copy waits for the update"
    assert device.awaited == [copied], "a thread waits for the copy alone"
    assert not publisher.begun
    copied.finish()
    eventually(lambda: publisher.published)
    publishing.close()


def test_a_closed_one_has_no_thread_any_more(publishing: Publishing) -> None:
    publishing.close()
    assert not publishing._thread.is_alive()
