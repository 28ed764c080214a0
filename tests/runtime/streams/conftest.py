from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders
from support.weights_learner import Learner

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.streams.episodes import BatchFrame
from juggler.runtime.streams.weights import WeightsSubscription
from juggler.runtime.wire.frames import Limits


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
    """The learner takes batch 1 at once; those after it wait until the gate is opened."""
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

    def subscribe(token: str = "secret", limits: Limits | None = None) -> WeightsSubscription:
        metadata = call_metadata(token, "run", "incarnation")
        made = WeightsSubscription(
            server.address, metadata, "envrunner-0", limits or Limits(), retry_seconds=0.02
        )
        subscriptions.append(made)
        return made

    yield subscribe
    for subscription in subscriptions:
        subscription.close()
