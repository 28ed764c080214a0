"""EnvRunners and learners that dial each other over TCP, with a directory in common or without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from juggler.envrunner.learner_streams import LearnerStreams
from juggler.runtime.actors.worker import Contact
from juggler.runtime.streams.memory_sockets import MemorySocket
from juggler.runtime.streams.shared_directory import learner_socket
from juggler.runtime.wire.v1 import training_pb2

LEARNER = training_pb2.Learners.Learner(
    worker_id="learner-0",
    incarnation="one",
    addresses=["127.0.0.1:1"],
    episode_addresses=["127.0.0.1:2"],
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(tmp_path))
    return tmp_path


def _connected(index: int = 0) -> tuple[str, str, list[str]]:
    """Where an EnvRunner sends batches, the memory that it shares, and what it says of that."""
    said: list[str] = []
    attachment: Any = SimpleNamespace(
        worker_id=f"envrunner-{index}",
        run_id="run",
        incarnation="runner",
        report=lambda note: said.append(note.text),
    )
    contact = Contact("nowhere:1", token="secret")
    streams = LearnerStreams("default", index, attachment, contact, lambda *_: None)
    streams.connect([LEARNER])
    sender: Any = streams.sender("learner-0")
    found = sender._address, sender._memory, said
    streams.close()
    return found


def test_with_a_learner_in_the_directory_batches_go_past_its_receivers() -> None:
    address = learner_socket("secret", "run", "one")
    listens = MemorySocket(address)
    assert _connected() == ("127.0.0.1:1", address, [])
    listens.close()


@pytest.mark.parametrize("whose", [("another", "run", "one"), ("secret", "run", "two")])
def test_a_learner_that_is_not_in_the_directory_is_said_once_for_all_envrunners(
    whose: tuple[str, str, str], directory: Path
) -> None:
    listens = MemorySocket(learner_socket(*whose))
    why = (
        f"shares no memory with learner-0, which has no socket in {directory}: it is on another "
        "host, or JUGGLER_SHARED_DIR is not set there"
    )
    assert _connected() == ("127.0.0.1:2", "", [why])
    assert _connected(index=1) == ("127.0.0.1:2", "", [])
    listens.close()


def test_without_a_directory_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUGGLER_SHARED_DIR")
    assert _connected() == ("127.0.0.1:2", "", [])
