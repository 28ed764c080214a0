"""SnapshotWriter: one cut of a run, from chunks on a stream to a checkpoint on the disk."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.driver.checkpoint.restoring import connectors_of, core_of
from juggler.driver.checkpoint.snapshots import SnapshotWriter, SnapshotWritten
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.record.metrics import Metrics
from juggler.driver.run_end import RunClock
from juggler.driver.workers.module_setups import spaces_of_environment
from juggler.runtime.actors.hub_events import Mailbox
from juggler.runtime.checkpoints.checkpoint import CheckpointError, read
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import training_pb2

pytestmark = pytest.mark.usefixtures("every_thread_ends")

PATIENCE = 30.0  # seconds until a test fails; nothing takes as long
TRAINED = {"default": "default"}
CONFIG = RunConfig.from_flat({"keep_checkpoints": 2, "stop_steps": 7})
SPACES = training_pb2.Ready.Module(
    observation_space=space_to_message(spaces.Box(-1, 1, (4,), np.float32)),
    action_space=space_to_message(spaces.Discrete(2)),
)


def _chunks(update: int = 3, size: int = 10, extra: str = '{"updates": 3}') -> list[bytes]:
    """A learner's state, `size` floats of it, in chunks of 100 bytes."""
    header = training_pb2.StateHeader(
        module_id="default", version=Version(1, update).message(), extra=extra
    )
    tree = {"modules": {"w": np.arange(size, dtype=np.float32) + update}}
    return list(encode_frame(header, tree, digest=True, chunk_bytes=100))


class World:
    """A writer, the driver's books, and what the writer says of its thread's work."""

    def __init__(self, directory: Path, newest: Path | None = None) -> None:
        self.core: DriverCore = core_of(CONFIG, None)
        self.metrics = Metrics()
        self.connectors: State = {}
        self.events: Mailbox[Any] = Mailbox()
        clock = RunClock(time.monotonic() - 60)
        self.writer = SnapshotWriter(self.events, directory, CONFIG, clock, newest)

    def take(self, chunks: list[bytes], whole: bool = True) -> None:
        for index, chunk in enumerate(chunks):
            last = whole and index == len(chunks) - 1
            books = self.core, self.metrics, SPACES, self.connectors
            self.writer.take("default", chunk, last, *books)

    def written(self) -> SnapshotWritten:
        """What the thread reports; the driver hears of it."""
        deadline = time.monotonic() + PATIENCE
        found: list[Any] = []
        while not found:
            assert time.monotonic() < deadline
            found = self.events.gather(PATIENCE)
        (written,) = found
        assert isinstance(written, SnapshotWritten)
        self.writer.done(written)
        return written


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "checkpoints")


def test_a_snapshot_becomes_a_checkpoint(world: World, tmp_path: Path) -> None:
    world.writer.begin(TRAINED)
    assert world.writer.under_way
    world.take(_chunks(size=200))
    assert world.writer.under_way, "it is not on the disk yet"
    written = world.written()
    assert written.problem == ""
    assert written.path == tmp_path / "checkpoints" / "000000003"
    assert not world.writer.under_way
    assert world.writer.newest == written.path
    found = read(written.path)
    assert found.version == (1, 3)
    np.testing.assert_equal(found.tree["modules"], {"w": np.arange(200, dtype=np.float32) + 3})
    (module,) = found.modules.values()
    assert (module["version"], module["extra"]) == ([1, 3], {"updates": 3})
    assert module["spaces"] == spaces_of_environment(SPACES)
    assert module["counters"]["sampled"] == found.counters["sampled"] == 0
    assert found.spaces == spaces_of_environment(SPACES)
    assert RunConfig.from_flat(found.config) == CONFIG


def test_connectors_in_a_checkpoint_that_are_none_are_named(world: World) -> None:
    world.writer.begin(TRAINED)
    world.connectors = {"filter": {"mean": np.zeros(2)}}
    world.take(_chunks())
    path = world.written().path
    assert path is not None
    with pytest.raises(CheckpointError, match="'filter/mean'"):
        connectors_of(read(path))


def test_a_directory_that_cannot_be_written_is_a_problem_and_no_end(tmp_path: Path) -> None:
    before = tmp_path / "before"
    (tmp_path / "checkpoints").write_text("a file in place of the directory")
    world = World(tmp_path / "checkpoints", newest=before)
    world.writer.begin(TRAINED)
    world.take(_chunks())
    written = world.written()
    assert written.path is None
    assert "checkpoints/000000003: cannot be written" in written.problem
    assert "\n" not in written.problem
    assert not world.writer.under_way, "the next one may go better"
    assert world.writer.newest == before
    (tmp_path / "checkpoints").unlink()
    world.writer.begin(TRAINED)
    world.take(_chunks())
    assert world.written().path == tmp_path / "checkpoints" / "000000003"


@pytest.mark.parametrize("came", [0, 1, 2])
def test_a_snapshot_is_given_up_when_its_learner_goes(world: World, came: int) -> None:
    world.writer.begin(TRAINED)
    world.take(_chunks(size=200)[:came], whole=False)
    world.writer.abandon("default")
    assert not world.writer.under_way
    world.writer.begin(TRAINED)
    world.take(_chunks(update=4, size=200))
    path = world.written().path
    assert path is not None
    assert read(path).version == (1, 4)


# What the driver lets a worker go for; the next snapshot is another learner's.
_NO_STATES = {
    "no chunk": [b"\xff"],
    "a cut one": [_chunks()[0][:-1]],
    "damaged": [_chunks()[0][:-1] + b"\xff"],
    "begun anew in the middle": [_chunks(size=200)[0]] * 2,
    "no JSON": _chunks(extra="{"),
}


@pytest.mark.parametrize("what", _NO_STATES)
def test_what_is_no_state_is_refused_and_a_later_one_is_taken(world: World, what: str) -> None:
    world.writer.begin(TRAINED)
    with pytest.raises(ValueError, match=r"\w"):
        world.take(_NO_STATES[what])
    world.writer.abandon("default")
    assert not world.writer.under_way
    world.writer.begin(TRAINED)
    world.take(_chunks(update=4))
    path = world.written().path
    assert path is not None
    assert json.loads((path / "checkpoint.json").read_text())["version"] == [1, 4]
