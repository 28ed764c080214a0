"""A learner beside the directory in which containers of its host share memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from juggler.learner.process.listening import LearnerServer
from juggler.learner.process.program import LearnerProgram
from juggler.runtime.actors.worker import Contact
from juggler.runtime.streams.memory_sockets import connect, memory_path
from juggler.runtime.streams.shared_directory import learner_socket


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LearnerServer]:
    server = LearnerServer(LearnerProgram(Contact("", socket_dir=str(tmp_path))))
    yield server
    server.close()


def test_envrunners_find_it_beside_its_own_socket_and_in_the_directory(
    server: LearnerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared := tmp_path / "shared").mkdir(mode=0o700)
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(shared))
    assert server.share_memory("run", "one") == ""
    assert server.memory is not None
    for address in (*server.addresses, learner_socket("", "run", "one")):
        server.memory.expect("token", lambda connection: connection.close())
        connect(memory_path(address), "token").close()


def test_where_the_directory_is_gone_it_says_so_and_shares_memory_beside_its_own_socket(
    server: LearnerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(tmp_path / "gone"))
    why = server.share_memory("run", "one")
    assert why.startswith(
        f"shares no memory with other containers: JUGGLER_SHARED_DIR={tmp_path}/gone: No such file"
    )
    assert server.memory is not None
    server.memory.expect("token", lambda connection: connection.close())
    (address,) = server.addresses
    connect(memory_path(address), "token").close()
