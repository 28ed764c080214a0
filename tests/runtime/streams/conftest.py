from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.learner_end import PATIENCE, LearnerEnd, Senders
from support.sharing import Peer, mapped, soon
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

    def subscribe(
        token: str = "secret",
        limits: Limits | None = None,
        inline: Callable[[str], None] | None = None,
    ) -> WeightsSubscription:
        metadata = call_metadata(token, "run", "incarnation")
        made = WeightsSubscription(
            server.address,
            metadata,
            "envrunner-0",
            limits or Limits(),
            retry_seconds=0.02,
            inline=inline,
        )
        subscriptions.append(made)
        return made

    yield subscribe
    for subscription in subscriptions:
        subscription.close()


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size, it goes through shared memory, of which there is none yet."""
    monkeypatch.setenv("JUGGLER_SHARED_MEMORY", "0")

    def none_is_left() -> bool:
        # gRPC's servers refer to themselves, and so to what came to those of other tests. They may
        # only just be ending.
        gc.collect()
        return not mapped()

    soon(none_is_left, "no other test has left memory")


@pytest.fixture
def peer(learner: LearnerEnd) -> Iterator[Peer]:
    made = Peer(learner.address)
    made.prove()
    learner.taken.clear()
    yield made
    made.close()
