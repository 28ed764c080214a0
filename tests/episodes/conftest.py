from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from learner_end import PATIENCE, LearnerEnd, Senders

from juggler.runtime.streams.episodes import BatchFrame


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
