"""EnvRunners and learners over TCP, with or without a shared directory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from juggler.envrunner.learner_streams import LearnerStreams
from juggler.runtime.actors.attachment import Contact
from juggler.runtime.streams.memory_socket import MemorySocket
from juggler.runtime.streams.shared_directory import learner_socket
from juggler.runtime.wire.v1 import training_pb2

LEARNER = training_pb2.Learners.Learner(
    worker_id="learner-0", incarnation="one", addresses=["127.0.0.1:1"]
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(tmp_path))
    return tmp_path


def _connected(index: int = 0, modules: int = 1) -> tuple[str, str, list[str]]:
    """An EnvRunner's sender, its shared memory, and its log."""
    said: list[str] = []
    attachment: Any = SimpleNamespace(
        worker_id=f"envrunner-{index}",
        run_id="run",
        incarnation="runner",
        report=lambda note: said.append(note.text),
    )
    contact = Contact("nowhere:1", token="secret")
    another = training_pb2.Learners.Learner()
    another.CopyFrom(LEARNER)
    another.worker_id = "learner-1"
    learners = [LEARNER, another]
    before: set[str] = set()
    for number in range(modules):
        streams = LearnerStreams(f"m{number}", index, attachment, contact, lambda *_: None, before)
        streams.connect(learners)
        sender: Any = streams.sender("learner-0")
        found = sender._address, sender._memory, said
        streams.close()
    return found


def test_with_a_learner_in_the_directory_its_memory_is_shared() -> None:
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
        f"shares no memory with learners that have no socket in {directory}: they are on other "
        "hosts, or JUGGLER_SHARED_DIR is not set there"
    )
    assert _connected(modules=3) == ("127.0.0.1:1", "", [why]), "many notes would end the worker"
    assert _connected(index=1) == ("127.0.0.1:1", "", [])
    listens.close()


def test_without_a_directory_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUGGLER_SHARED_DIR")
    assert _connected() == ("127.0.0.1:1", "", [])


def test_a_directory_that_is_gone_or_memory_that_is_not_to_be_shared_is_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listens = MemorySocket(learner_socket("secret", "run", "one"))
    monkeypatch.setenv("JUGGLER_SHARED_MEMORY", "off")
    assert _connected() == ("127.0.0.1:1", "", [])
    monkeypatch.delenv("JUGGLER_SHARED_MEMORY")
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(directory / "gone"))
    address, memory, said = _connected(modules=2)
    assert (address, memory) == ("127.0.0.1:1", "")
    (one,) = said
    assert one.startswith(f"shares no memory: JUGGLER_SHARED_DIR={directory}/gone: No such file")
    listens.close()
