from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders
from support.sharing import disregard_memories
from support.weights_learner import PATIENCE as WEIGHTS_PATIENCE
from support.weights_learner import SIZE, Join, Learner, names_of, same

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import BatchFrame
from juggler.runtime.streams.host_weights import Meeting
from juggler.runtime.streams.weights_stream import WeightsSubscription


@pytest.fixture
def learner(tmp_path: Path, every_thread_ends: None) -> Iterator[LearnerEnd]:
    end = LearnerEnd(tmp_path)
    yield end
    end.stop()


@pytest.fixture
def senders(every_thread_ends: None) -> Iterator[Senders]:
    made = Senders()
    yield made
    made.close()


@pytest.fixture
def gate(learner: LearnerEnd) -> Iterator[threading.Event]:
    """The learner takes batch 1; the next ones wait for the gate."""
    opened = threading.Event()

    def answer(frame: BatchFrame) -> str:
        assert frame.header.batch_id == 1 or opened.wait(PATIENCE)
        return ""

    learner.answer = answer
    yield opened
    opened.set()


@pytest.fixture
def server(tmp_path: Path, every_thread_ends: None) -> Iterator[Learner]:
    made = Learner(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def subscribe(server: Learner) -> Iterator[Callable[..., WeightsSubscription]]:
    subscriptions: list[WeightsSubscription] = []

    def subscribe(token: str = "secret", address: str = "", **more: Any) -> WeightsSubscription:
        metadata = call_metadata(token, "run", "incarnation")
        made = WeightsSubscription(
            address or server.address,
            metadata,
            "envrunner-0",
            retry_seconds=0.0,
            **more,
        )
        subscriptions.append(made)
        return made

    yield subscribe
    for subscription in subscriptions:
        subscription.close()
        subscription._thread.join(PATIENCE)  # it waits only a moment itself


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    """A place of this test's own, which is empty at the end."""
    made = Meeting(secrets.token_hex())
    yield made
    assert not names_of(made), "no process has a name of the meeting"


@pytest.fixture
def notes() -> list[str]:
    """What readers of a host say."""
    return []


@pytest.fixture
def join(meeting: Meeting, notes: list[str], subscribe: Callable[..., WeightsSubscription]) -> Join:
    """Makes readers that meet, at an address of the learner."""
    return lambda address="": subscribe(address=address, meeting=meeting, alone=notes.append)


@pytest.fixture
def publish(server: Learner) -> Callable[..., Version]:
    numbers = count(1)

    def publish(*readers: WeightsSubscription) -> Version:
        """Publish the next version, and wait until it is everywhere."""
        version = server.publish(1, next(numbers), SIZE)
        for each in readers:
            assert same(each.wait_for(version, WEIGHTS_PATIENCE), version, SIZE)
        return version

    return publish


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of any size go through shared memory, empty so far."""
    monkeypatch.setenv("JUGGLER_SHARED_MEMORY", "0")
    disregard_memories()
