"""SnapshotWriter: from chunks on a stream to a checkpoint on disk."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from gymnasium import spaces

from juggler.driver.checkpoint.first_weights import FirstCheckpoints
from juggler.driver.checkpoint.snapshots import (
    SnapshotWriter,
    SnapshotWritten,
    begin_commands,
    connectors_of,
    core_of,
    must_be_sound,
    state_reader,
)
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.reporting.metrics import Metrics
from juggler.driver.run_end import RunClock
from juggler.driver.run_parts import RunParts
from juggler.driver.workers.module_setups import spaces_of_environment
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read
from juggler.runtime.connectors.mergeable_state import Moments, State
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


def _chunks(
    update: int = 3, size: int = 10, extra: str = '{"updates": 3}', module_id: str = "default"
) -> list[bytes]:
    """A learner's state, `size` floats of it, in chunks of 100 bytes."""
    header = training_pb2.StateHeader(
        module_id=module_id, version=Version(1, update).message(), extra=extra
    )
    weights = {"w": np.arange(size, dtype=np.float32) + update}
    tree = {"default": {"parameters": weights, "buffers": {}}}
    return list(encode_frame(header, tree, digest=True, chunk_bytes=100))


class World:
    """A writer, the driver's books, and the reports of its thread."""

    def __init__(
        self, directory: Path, newest: Path | None = None, config: RunConfig = CONFIG
    ) -> None:
        self.core: DriverCore = core_of(config, None)
        self.metrics = Metrics()
        self.connectors: State = {}
        self.events: Mailbox[Any] = Mailbox()
        clock = RunClock(time.monotonic() - 60)
        self.writer = SnapshotWriter(self.events, directory, config, clock, newest)

    def take(self, chunks: list[bytes], whole: bool = True, module_id: str = "default") -> None:
        for index, chunk in enumerate(chunks):
            last = whole and index == len(chunks) - 1
            parts = SimpleNamespace(
                core=self.core,
                metrics=self.metrics,
                registry=SimpleNamespace(spaces=defaultdict(lambda: SPACES)),
                connectors=defaultdict(lambda: SimpleNamespace(merged=self.connectors)),
                more_counters=dict,
            )
            self.writer.add_chunk(module_id, chunk, last, cast(RunParts, parts))

    def written(self) -> SnapshotWritten:
        """What the thread reports to the driver."""
        (written,) = self.events.gather(PATIENCE)
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
    weights: Any = found.tree["default"]
    np.testing.assert_equal(weights["parameters"]["w"], np.arange(200, dtype=np.float32) + 3)
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
    (tmp_path / "checkpoints").write_text("a file instead of the directory")
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
    "restarted in the middle": [_chunks(size=200)[0]] * 2,
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


# Checkpoints of runs with several modules: one cut of all, from which each module continues.


TWO = RunConfig.from_flat(
    {
        "algorithm": "ppo",
        "agents": {"red_0": "red", "blue_0": "blue"},
        "modules": {"blue": {"algorithm": "impala"}},
        "connectors": {"env_to_module": ["mean_std_filter"]},
    }
)


@pytest.fixture
def saved_of_two(tmp_path: Path) -> Checkpoint:
    """Of both modules, whose learners answer at once."""
    world = World(tmp_path / "checkpoints", config=TWO)
    world.writer.begin({"red": "red", "blue": "blue"})

    def take(update: int, module_id: str, part: slice, whole: bool = True) -> None:
        moments = Moments.of(np.array([[float(update)]]))
        world.connectors = {"mean_std_filter": moments.to_tree()}
        world.take(_chunks(update, 100, module_id=module_id)[part], whole, module_id)

    for module_id, steps in (("red", 100), ("blue", 7)):
        ledger = world.core.modules[module_id].ledger
        ledger.sampled, ledger.trained = steps, steps
    take(2, "blue", slice(2), whole=False)
    take(1, "red", slice(None))
    assert not world.writer.writing
    take(2, "blue", slice(2, None))
    assert world.writer.writing
    path = world.written().path
    assert path is not None
    return read(path)


def test_books_of_modules_that_do_not_add_up_are_refused(saved_of_two: Checkpoint) -> None:
    must_be_sound(saved_of_two)
    saved_of_two.modules["blue"]["counters"] |= {"trained": 8, "sampled": 8}
    with pytest.raises(CheckpointError, match="its modules add up to"):
        must_be_sound(saved_of_two)


def _beginning(saved: Checkpoint, agents: dict[str, str]) -> Any:
    values = {**TWO.flat(), "agents": agents, "modules": {}}
    config = RunConfig.from_flat({**values, "from_checkpoint": str(saved.path)})
    return FirstCheckpoints.of(config).beginning(config)


def test_each_module_begins_with_the_weights_of_its_namesake(saved_of_two: Checkpoint) -> None:
    beginning, warnings = _beginning(saved_of_two, {"a": "blue", "b": "red"})
    first = {name: each.weights["w"][0] for name, each in beginning.items()}
    assert first == {"blue": 2.0, "red": 1.0}
    (command,) = begin_commands("blue", beginning["blue"])
    frame = state_reader().feed(command.chunk)
    assert frame is not None
    assert frame.tree["default"]["w"][0] == 2.0  # type: ignore[index,call-overload]
    merged = connectors_of(None, beginning["blue"], "blue").merged
    assert Moments.from_tree(merged["mean_std_filter"]).mean == [2.0]
    assert warnings == []
    with pytest.raises(ConfigError, match="modules 'blue'"):
        _beginning(saved_of_two, {"a": "green"})
