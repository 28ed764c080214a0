"""Checkpoints of runs with several modules: one cut of all, from which each module continues."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.beginnings import beginning_of
from support.workers_world import SPACE

from juggler.driver.checkpoint.restoring import (
    begin_commands,
    connectors_of,
    core_of,
    must_be_sound,
)
from juggler.driver.checkpoint.snapshots import (
    SnapshotWriter,
    SnapshotWritten,
    state_reader,
)
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.record.metrics import Metrics
from juggler.driver.run_end import RunClock
from juggler.driver.workers.module_setups import Spaces
from juggler.runtime.actors.hub_events import Mailbox
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read
from juggler.runtime.connectors.mergeable_state import Moments, State
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import training_pb2

TRAINED = {"red": "red", "blue": "blue"}
CONFIG = RunConfig.from_flat(
    {
        "algorithm": "ppo",
        "agents": {"red_0": "red", "blue_0": "blue"},
        "modules": {"blue": {"algorithm": "impala"}},
        "connectors": {"env_to_module": ["mean_std_filter"]},
    }
)
SPACES = Spaces(SPACE, SPACE)
PATIENCE = 30.0  # seconds until a test fails


def _learned(value: float) -> State:
    return {"mean_std_filter": Moments.of(np.array([[value]])).to_tree()}


def _chunks(module_id: str, version: tuple[int, int], value: float) -> list[bytes]:
    """A learner's state in chunks of 100 bytes; learners call their module "default"."""
    weights = {"parameters": {"w": np.full(100, value, np.float32)}, "buffers": {}}
    tree = {"default": weights, "learner_pipelines": {"default": {"seen": np.full(1, value)}}}
    header = training_pb2.StateHeader(
        module_id=module_id, version=Version(*version).message(), extra=f'{{"updates": {value}}}'
    )
    return list(encode_frame(header, tree, digest=True, chunk_bytes=100))


class World:
    """A writer, the books of a run with two modules, and who is asked for what."""

    def __init__(self, directory: Path) -> None:
        self.core = core_of(CONFIG, None)
        self.metrics = Metrics()
        self.events: Mailbox[Any] = Mailbox()
        self.directory = directory
        clock = RunClock(time.monotonic())
        self.writer = SnapshotWriter(self.events, directory, CONFIG, clock, None)

    def take(self, module_id: str, chunks: list[bytes], whole: bool = True) -> None:
        for index, chunk in enumerate(chunks):
            last = whole and index == len(chunks) - 1
            value = 1.0 if module_id == "red" else 2.0
            books = self.core, self.metrics, SPACES, _learned(value)
            self.writer.take(module_id, chunk, last, *books)

    def trains(self, module_id: str, steps: int) -> None:
        ledger = self.core.modules[module_id].ledger
        ledger.sampled += steps
        ledger.trained += steps

    def written(self) -> Checkpoint:
        (written,) = self.events.gather(PATIENCE)
        assert isinstance(written, SnapshotWritten)
        self.writer.done(written)
        assert written.path is not None, written.problem
        return read(written.path)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "checkpoints")


def _saved(world: World) -> Checkpoint:
    """A checkpoint of both modules, whose learners answer at once."""
    world.trains("red", 100)
    world.trains("blue", 7)
    world.writer.begin(TRAINED)
    red, blue = _chunks("red", (2, 30), 1.0), _chunks("blue", (3, 40), 2.0)
    world.take("blue", blue[:2], whole=False)
    world.take("red", red)
    assert not world.writer.writing
    world.take("blue", blue[2:])
    assert world.writer.writing
    return world.written()


# -- learners that die ----------------------------------------------------------------------------


# -- asking ---------------------------------------------------------------------------------------


# -- what is refused ------------------------------------------------------------------------------


def _changed(saved: Checkpoint, module_id: str, **changes: Any) -> Checkpoint:
    saved.modules[module_id]["counters"] |= changes
    return saved


def test_books_of_modules_that_do_not_add_up_are_refused(world: World) -> None:
    saved = _saved(world)
    with pytest.raises(CheckpointError, match="its modules add up to"):
        must_be_sound(_changed(saved, "blue", trained=8, sampled=8))


# -- beginning with another run's weights ---------------------------------------------------------


def _beginning(saved: Checkpoint, agents: dict[str, str], **keys: Any) -> Any:
    values = {**CONFIG.flat(), "agents": agents, "modules": {}, **keys}
    return beginning_of(RunConfig.from_flat({**values, "from_checkpoint": str(saved.path)}))


def test_each_module_begins_with_the_weights_of_its_namesake(world: World) -> None:
    beginning = _beginning(_saved(world), {"a": "blue", "b": "red"})
    assert {name: arrays["w"][0] for name, arrays in beginning.weights.items()} == {
        "blue": 2.0,
        "red": 1.0,
    }
    (command,) = begin_commands("blue", beginning)
    frame = state_reader().feed(command.chunk)
    assert frame is not None
    assert frame.tree["default"]["w"][0] == 2.0  # type: ignore[index,call-overload]
    merged = connectors_of(None, beginning, "blue").merged
    assert Moments.from_tree(merged["mean_std_filter"]).mean == [2.0]
    assert beginning.warnings == ()


def test_a_module_without_a_namesake_is_an_error_that_names_those_there(world: World) -> None:
    with pytest.raises(ConfigError, match="modules 'blue'"):
        _beginning(_saved(world), {"a": "green"})
