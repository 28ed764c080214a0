"""What peers send takes a share of the memory that a container may have, not of its host's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from support.batch_stores import World, refused

from juggler.learner.data.collate import _copiers
from juggler.learner.process import listening
from juggler.learner.process.listening import LearnerServer
from juggler.learner.process.program import LearnerProgram
from juggler.runtime.actors import resources
from juggler.runtime.actors.worker import Contact
from juggler.runtime.streams.receivers import ReceiverProgram
from juggler.runtime.streams.unfinished import Unfinished
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import flatten


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a container says what it may have: nothing yet."""
    place = tmp_path / "cgroup"
    place.mkdir()
    monkeypatch.setattr(resources, "_CGROUP", place)
    _copiers.cache_clear()
    yield place
    _copiers.cache_clear()


def test_the_smallest_limit_is_what_a_process_may_have(container: Path) -> None:
    of_host = resources.total_memory()
    assert of_host > 1 << 30
    (container / "memory.max").write_text("max\n")
    assert resources.total_memory() == of_host
    (container / "memory.max").write_text(f"{3 << 20}\n")
    assert resources.total_memory() == 3 << 20
    (container / "memory").mkdir()
    (container / "memory" / "memory.limit_in_bytes").write_text(f"{2 << 20}\n")
    assert resources.total_memory() == 2 << 20


def test_unfinished_frames_take_a_quarter_of_it(container: Path) -> None:
    (container / "memory.max").write_text("4000\n")
    unfinished, stream = Unfinished(), cast(grpc.ServicerContext, object())
    unfinished.hold(stream, 1000)
    with pytest.raises(WireError, match="1001 bytes of unfinished frames wait here already"):
        unfinished.hold(stream, 1001)


def test_batches_that_wait_take_half_of_it(container: Path, world: World) -> None:
    size = sum(array.nbytes for _, array in flatten(world.frame(1).tree))
    (container / "memory.max").write_text(f"{2 * size}\n")
    store = world.open()
    assert store.take(world.frame(1)) == ""
    assert refused(world, store, world.frame(2)) == f"{size} bytes of batches wait here already"


def test_all_receivers_take_a_quarter_of_it(
    container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container / "memory.max").write_text("8000\n")
    started: list[ReceiverProgram] = []

    def start(self: Any, programs: Sequence[ReceiverProgram], *_: Any) -> None:
        started.extend(programs)

    monkeypatch.setattr(listening.Receivers, "start", start)
    contact = Contact("", socket_dir=str(tmp_path))
    server = LearnerServer(LearnerProgram(contact, bind="127.0.0.1:0", receivers=2))
    try:
        server.start_receivers("run", b"key", print, print)
    finally:
        server.close()
    assert [each.most_bytes for each in started] == [1000, 1000]


def test_columns_are_copied_by_half_of_the_cores_of_a_container(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (container / "cpu.max").write_text("600000 100000\n")
    assert _copiers()._max_workers == 3
