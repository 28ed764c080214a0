"""Checkpoints of runs with several modules: one cut of all, from which each module continues."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from support.beginnings import beginning_of
from support.workers_world import SPACE

from juggler.driver.checkpoint.restoring import (
    begin_commands,
    connectors_of,
    core_of,
    metrics_of,
    must_be_sound,
    restore_commands,
)
from juggler.driver.checkpoint.snapshots import (
    Checkpointing,
    SnapshotWriter,
    SnapshotWritten,
    state_reader,
)
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.core.events import LearnerJoined
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


def test_the_states_of_all_modules_become_one_checkpoint(world: World) -> None:
    saved = _saved(world)
    assert saved.module_ids == ("red", "blue")
    assert saved.version == (5, 70), "whatever module is set back, its generation grows"
    assert saved.path is not None
    assert saved.path.name == "000000070"
    assert [saved.version_of(name) for name in ("red", "blue")] == [(2, 30), (3, 40)]
    assert [saved.counters_of(name)["trained"] for name in ("red", "blue")] == [100, 7]
    assert saved.counters["trained"] == 107
    assert saved.spaces_of("red") == SPACES.to_json()
    assert RunConfig.from_flat(saved.config) == CONFIG
    must_be_sound(saved)


def test_each_module_has_the_books_of_the_moment_when_its_state_began_to_come(world: World) -> None:
    red, blue = _chunks("red", (1, 1), 1.0), _chunks("blue", (1, 1), 2.0)
    world.writer.begin(TRAINED)
    world.take("red", red[:1], whole=False)
    for module_id in ("red", "blue"):
        world.trains(module_id, 50)
    world.metrics.episodes_ended([1.0], [5])
    world.take("blue", blue[:1], whole=False)
    for module_id in ("red", "blue"):
        world.trains(module_id, 1000)
    world.metrics.episodes_ended([2.0], [6])
    world.take("red", red[1:])
    world.take("blue", blue[1:])
    saved = world.written()
    assert [saved.counters_of(name)["trained"] for name in ("red", "blue")] == [0, 50]
    assert (saved.counters["trained"], saved.counters["returns"]) == (50, [1.0])
    must_be_sound(saved)


def test_every_module_is_restored_at_its_own_version_with_its_own_books(world: World) -> None:
    saved = _saved(world)
    core = core_of(CONFIG, saved)
    for module_id, version, trained in (("red", (2, 30), 100), ("blue", (3, 40), 7)):
        module = core.modules[module_id]
        assert module.weights_version == Version(*version)
        assert module.ledger.trained == trained
    assert core.updates == 70
    assert core.next_id == saved.counters["next_id"]
    assert metrics_of(saved).episodes == 0


@pytest.mark.parametrize(("module_id", "value"), [("red", 1.0), ("blue", 2.0)])
def test_a_learner_gets_the_state_of_its_module_alone(
    world: World, module_id: str, value: float
) -> None:
    saved = _saved(world)
    reader = state_reader()
    frames = [reader.feed(command.chunk) for command in restore_commands(module_id, saved)]
    assert frames[-1] is not None
    tree: Any = frames[-1].tree
    assert tree.keys() == {"default", "learner_pipelines"}
    assert (tree["default"]["parameters"]["w"] == value).all()
    assert tree["learner_pipelines"]["default"]["seen"] == [value]
    assert f'"updates": {value}' in frames[-1].header.extra


def test_connectors_have_learned_module_by_module(world: World) -> None:
    saved = _saved(world)
    for module_id, value in (("red", 1.0), ("blue", 2.0)):
        merged = connectors_of(saved, module_id=module_id).merged
        assert Moments.from_tree(merged["mean_std_filter"]).mean == [value]


# -- learners that die ----------------------------------------------------------------------------


def test_a_state_that_is_there_outlives_its_learner(world: World) -> None:
    world.writer.begin(TRAINED)
    world.take("blue", _chunks("blue", (1, 1), 2.0))
    world.writer.abandon("blue")
    world.take("red", _chunks("red", (1, 2), 1.0))
    assert world.written().version == (2, 3)


# -- asking ---------------------------------------------------------------------------------------


class _Commands:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.anew: list[int] = []

    def send_to(self, worker_id: str, message: Any) -> None:
        self.told.append((worker_id, message))

    def send(self, worker: Any, message: Any) -> None:
        self.told.append((worker, message))

    def restart_runners(self, update: int) -> None:
        self.anew.append(update)


class _Registry:
    """Has every learner, by its name; its seed is the update."""

    ready: ClassVar[dict[str, str]] = {
        name: name for name in ("learner-0", "learner-1", "learner-2")
    }
    trained = TRAINED

    def seed(self, worker: Any, update: int) -> int:
        return update


def _checkpointing(world: World) -> tuple[Checkpointing, _Commands]:
    commands: Any = _Commands()
    registry: Any = _Registry()
    config = RunConfig.from_flat({"synchronous": True, "checkpoint_updates": 2})
    parts: Any = SimpleNamespace(
        config=config,
        core=world.core,
        registry=registry,
        commands=commands,
        snapshots=world.writer,
        league=None,
    )
    return Checkpointing(parts), commands


def _joins(world: World, learner: str, module_id: str) -> None:
    world.core.book(LearnerJoined(learner, "a", module_id))
    world.core.issue_updates()


def test_one_learner_of_each_module_is_asked_once_all_have_one(world: World) -> None:
    checkpointing, commands = _checkpointing(world)
    _joins(world, "learner-0", "red")
    assert not checkpointing.begin()
    assert not world.writer.under_way
    _joins(world, "learner-1", "blue")
    assert checkpointing.begin()
    asked = [(worker, message.module_id) for worker, message in commands.told]
    assert asked == [("learner-0", "red"), ("learner-1", "blue")]
    assert not checkpointing.begin(), "one at a time"
    checkpointing.left("learner-1")
    world.take("red", _chunks("red", (1, 1), 1.0))
    assert not world.writer.under_way
    assert checkpointing.begin()


def test_a_process_that_hosts_all_modules_is_asked_for_each(world: World) -> None:
    checkpointing, commands = _checkpointing(world)
    for module_id in ("red", "blue"):
        _joins(world, "learner-0", module_id)
    assert checkpointing.begin()
    assert [worker for worker, _ in commands.told] == ["learner-0"] * 2
    checkpointing.left("learner-0")
    assert not world.writer.under_way


def test_in_synchronous_mode_every_module_begins_anew_behind_a_checkpoint(world: World) -> None:
    checkpointing, commands = _checkpointing(world)
    for learner, module_id in (("learner-0", "red"), ("learner-1", "blue")):
        _joins(world, learner, module_id)
    modules = world.core.modules.values()
    for update in (1, 2):
        for module in modules:
            module.weights_version = Version(1, update)
        assert checkpointing.holds_up(world.core.updates) == (update == 2), "rounds count"
    assert commands.anew == [4]
    assert [message.seed for _, message in commands.told] == [4, 4]
    assert checkpointing.holds_up(4), "until it is on the disk"


# -- what is refused ------------------------------------------------------------------------------


def _changed(saved: Checkpoint, module_id: str, **changes: Any) -> Checkpoint:
    saved.modules[module_id]["counters"] |= changes
    return saved


def test_books_of_a_module_that_nobody_has_kept_are_refused(world: World) -> None:
    saved = _saved(world)
    with pytest.raises(CheckpointError, match="module 'blue'"):
        must_be_sound(_changed(saved, "blue", trained=8))


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
