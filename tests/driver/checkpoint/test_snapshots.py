"""Checkpoints: how they are written, and what runs begin with."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from gymnasium import spaces
from support.beginnings import beginning_of
from support.workers_world import (
    ROWS,
    SHAPE,
    STEPS,
    WorkersWorld,
    answer_the_snapshot,
    play_a_round,
    ready_message,
    requests,
    synchronous,
)

import juggler
from juggler.driver.agent_tables import FoundGroup, with_agents
from juggler.driver.checkpoint.first_weights import (
    FirstCheckpoints,
    FrozenModule,
    frozen_modules,
    must_fit,
    shared_parts_must_agree,
    with_digests,
)
from juggler.driver.checkpoint.snapshots import (
    Checkpoints,
    SnapshotWritten,
    begin_commands,
    connectors_of,
    core_of,
    counters_of,
    must_be_sound,
    state_reader,
)
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.events import LearnerJoined
from juggler.driver.reporting.metrics import Metrics
from juggler.driver.run_end import RunClock, Times
from juggler.driver.run_parts import RunParts
from juggler.driver.workers.worker_registry import WorkerRegistry
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read, write
from juggler.runtime.checkpoints.weights import (
    module_in,
    playing_tree,
    read_module,
    tree_digest,
    weights_of,
)
from juggler.runtime.connectors.mergeable_state import Moments, State, from_bytes, to_bytes
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import training_pb2

PATIENCE = 30.0  # seconds until a test fails; nothing takes as long
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
        for module_id in self.core.modules:
            self.core.book(LearnerJoined("learner-0", "incarnation", module_id))
        self.core.issue_updates()  # the groups form
        trained = {module_id: module_id for module_id in self.core.modules}
        parts = SimpleNamespace(
            config=config,
            clock=RunClock(time.monotonic() - 60),
            core=self.core,
            league=None,
            metrics=self.metrics,
            registry=SimpleNamespace(spaces=defaultdict(lambda: SPACES), trained=trained),
            commands=SimpleNamespace(send_to=lambda *_: None),
            modules=defaultdict(
                lambda: SimpleNamespace(connectors=SimpleNamespace(merged=self.connectors))
            ),
            values=SimpleNamespace(to_state=dict),
        )
        self.writer = Checkpoints(cast(RunParts, parts), directory, self.events.put, newest)

    def take(self, chunks: list[bytes], whole: bool = True, module_id: str = "default") -> None:
        for index, chunk in enumerate(chunks):
            last = whole and index == len(chunks) - 1
            self.writer.add_chunk(module_id, chunk, last)

    def written(self) -> SnapshotWritten:
        """What the thread reports to the driver."""
        (written,) = self.events.gather(PATIENCE)
        assert isinstance(written, SnapshotWritten)
        self.writer.done(written)
        return written


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "checkpoints")


@pytest.mark.usefixtures("every_thread_ends")
def test_connectors_in_a_checkpoint_that_are_none_are_named(world: World) -> None:
    assert world.writer.begin()
    world.connectors = {"filter": {"mean": np.zeros(2)}}
    world.take(_chunks())
    path = world.written().path
    assert path is not None
    with pytest.raises(CheckpointError, match="at 'filter': moments are"):
        connectors_of(read(path))


@pytest.mark.usefixtures("every_thread_ends")
def test_a_directory_that_cannot_be_written_is_a_problem_and_no_end(tmp_path: Path) -> None:
    before = tmp_path / "before"
    (tmp_path / "checkpoints").write_text("a file instead of the directory")
    world = World(tmp_path / "checkpoints", newest=before)
    assert world.writer.begin()
    world.take(_chunks())
    written = world.written()
    assert written.path is None
    assert "checkpoints/000000003: cannot be written" in written.problem
    assert "\n" not in written.problem
    assert not world.writer.under_way, "the next one may go better"
    assert world.writer.newest == before
    (tmp_path / "checkpoints").unlink()
    assert world.writer.begin()
    world.take(_chunks())
    assert world.written().path == tmp_path / "checkpoints" / "000000003"


@pytest.mark.usefixtures("every_thread_ends")
@pytest.mark.parametrize("came", [0, 1, 2])
def test_a_snapshot_is_given_up_when_its_learner_goes(world: World, came: int) -> None:
    assert world.writer.begin()
    world.take(_chunks(size=200)[:came], whole=False)
    world.writer.abandon("default")
    assert not world.writer.under_way
    assert world.writer.begin()
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


@pytest.mark.usefixtures("every_thread_ends")
@pytest.mark.parametrize("what", _NO_STATES)
def test_what_is_no_state_is_refused_and_a_later_one_is_taken(world: World, what: str) -> None:
    assert world.writer.begin()
    with pytest.raises(ValueError, match=r"\w"):
        world.take(_NO_STATES[what])
    world.writer.abandon("default")
    assert not world.writer.under_way
    assert world.writer.begin()
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
    assert world.writer.begin()

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


@pytest.mark.usefixtures("every_thread_ends")
def test_books_of_modules_that_do_not_add_up_are_refused(saved_of_two: Checkpoint) -> None:
    must_be_sound(saved_of_two)
    saved_of_two.modules["blue"]["counters"] |= {"trained": 8, "sampled": 8}
    with pytest.raises(CheckpointError, match="its modules add up to"):
        must_be_sound(saved_of_two)


def _beginning(saved: Checkpoint, agents: dict[str, str]) -> Any:
    values = {**TWO.flat(), "agents": agents, "modules": {}}
    config = RunConfig.from_flat({**values, "from_checkpoint": str(saved.path)})
    return FirstCheckpoints.of(config).beginning(config)


@pytest.mark.usefixtures("every_thread_ends")
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


# Checkpoints between rounds of a synchronous run, and messages after one.


def checkpoint_is_on_the_disk(world: WorkersWorld) -> None:
    (written,) = world.written.gather(timeout=30)
    assert written.problem == ""
    world.parts.checkpoints.done(written)
    world.turn()


def test_behind_a_checkpoint_all_begin_anew_as_those_of_a_resumed_run_begin(tmp_path: Path) -> None:
    world = synchronous(tmp_path, seed=5)
    play_a_round(world)
    play_a_round(world)
    answer_the_snapshot(world)
    checkpoint_is_on_the_disk(world)
    told = [request.seed if request.HasField("seed") else None for _, request in requests(world)]
    _, snapshot = world.asked(world.learner, training_pb2.Snapshot)[-1]

    resumed = WorkerRegistry(RunConfig.from_flat({"seed": 5, **SHAPE}), first_update=2)
    ((_, runner),) = resumed.joined(world.runner)
    ready = ready_message(rows=ROWS, steps=STEPS)
    resumed.runner_ready(world.runner, ready)
    ((_, learner),) = resumed.joined(world.learner)
    assert told == [None] * 4 + [runner.seed, None]
    assert snapshot.seed == learner.seed


def test_behind_a_checkpoint_all_are_told_what_connectors_had_learned_there(tmp_path: Path) -> None:
    world = synchronous(tmp_path)
    much, little = (
        to_bytes({"filter": Moments.of(np.zeros((count, 1))).to_tree()}) for count in (1000, 1)
    )
    play_a_round(world, connector_delta=much)
    play_a_round(world, connector_delta=little)
    answer_the_snapshot(world)
    checkpoint_is_on_the_disk(world)
    told = [request.connector_state for _, request in requests(world)]
    assert [bool(state) for state in told] == [False, False, True, False, True, False]
    saved = connectors_of(read(tmp_path / "000000002"))
    np.testing.assert_equal(from_bytes(told[4]), saved.merged)
    assert Moments.from_tree(from_bytes(told[4])["filter"]).count == 2002


def test_a_checkpoint_that_fails_holds_up_nobody_for_longer(tmp_path: Path) -> None:
    world = synchronous(tmp_path)
    play_a_round(world)
    play_a_round(world)
    world.fail(world.learner, world.asked(world.learner, training_pb2.Snapshot)[-1][0])
    assert len(requests(world)) == 6
    assert requests(world)[-2][1].HasField("seed"), "whether or not the disk is full"


def test_a_run_that_is_to_stop_begins_neither_round_nor_checkpoint(tmp_path: Path) -> None:
    world = synchronous(tmp_path, stop_steps=80)
    play_a_round(world)
    play_a_round(world)
    assert world.parts.end.reason == "stop_steps"
    assert len(requests(world)) == 4
    assert not world.parts.checkpoints.under_way
    counters = world.core.ledger.counters()
    assert (counters.sampled, counters.trained, counters.in_flight) == (80, 80, 0)


# Checkpoints that runs begin with, play with and continue from.


SEES, ACTS = (
    space_to_message(spaces.Box(-1, 1, (2,), np.float32)),
    space_to_message(spaces.Discrete(3)),
)
GROUP = FoundGroup(("cat", "mouse"), SEES, ACTS)
LEARNED = {"mean_std_filter": Moments(np.array(3.0), np.ones(2), np.ones(2)).to_tree()}
TABLES: dict[str, Any] = {"agents": {"cat": "main", "mouse": "old"}}


def save(directory: Path, *module_ids: str) -> Path:
    """A run that has ended."""
    said = {"observation": MessageToDict(SEES), "action": MessageToDict(ACTS)}
    tree: dict[str, Any] = {
        each: {
            "parameters": {"scale": np.full((), k, np.float32)},
            "buffers": {"count": np.array(k)},
            "optimizer": {"step": np.array(9)},
        }
        for k, each in enumerate(module_ids)
    }
    learned = LEARNED if module_ids == ("default",) else {module_ids[-1]: LEARNED}
    modules = {each: {"version": [1, 4], "extra": {}, "spaces": said} for each in module_ids}
    tables = {"modules": {each: {"model": {"hidden_sizes": [8]}} for each in module_ids}}
    agents = {"agents": {f"agent_{each}": each for each in module_ids}}
    config = RunConfig.from_flat({**agents, **tables}).flat()
    config["connectors"] = {"env_to_module": ["mean_std_filter"]}
    made = Checkpoint((1, 4), {**tree, "connectors": learned}, modules, {}, config, said)
    write(directory / "checkpoints", made, 3)
    return directory


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return save(tmp_path / "before", "hunter", "prey")


def config_with(**old: Any) -> RunConfig:
    return RunConfig.from_flat({**TABLES, "modules": {"old": old}})


def frozen_in(config: RunConfig, run_dir: Path | None = None) -> FrozenModule:
    (module,) = frozen_modules(config, run_dir).values()
    return module


# -- what a configuration may say -----------------------------------------------------------------


def test_a_list_of_modules_needs_equal_spaces_and_random_fits_all() -> None:
    groups = [GROUP, FoundGroup(("dog",), ACTS, ACTS)]
    tables = {"cat": ["a", "random"], "mouse": "a", "dog": ["b", "random"]}
    assert with_agents(RunConfig.from_flat({"agents": tables}), groups).module_ids == ("a", "b")
    tables["dog"] = ["b", "a"]
    with pytest.raises(ConfigError, match="'cat'"):
        with_agents(RunConfig.from_flat({"agents": tables}), groups)


def test_a_mapping_without_a_table_chooses_among_the_modules_that_have_tables() -> None:
    keys: dict[str, Any] = {"mapping": "my_file:pick", "modules": {"a": {}, "b": {}}}
    config = with_agents(RunConfig.from_flat(keys), [GROUP])
    assert config.played_by == dict.fromkeys(("cat", "mouse"), ("a", "b", "random"))
    assert config.agents.mapping == "my_file:pick"
    with pytest.raises(ConfigError, match="agents 'cat'"):
        with_agents(RunConfig.from_flat(keys), [GROUP, FoundGroup(("dog",), ACTS, ACTS)])
    with pytest.raises(ConfigError, match="there is no module to choose from"):
        with_agents(RunConfig.from_flat({"mapping": "my_file:pick"}), [GROUP])
    with pytest.raises(ConfigError, match="mapping: the environment"):
        with_agents(RunConfig.from_flat({"mapping": "my_file:pick"}), [FoundGroup((), SEES, ACTS)])


# -- what they play with --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{}", "there are several modules: name one of"),
        ("{}:mouse", "there is no module 'mouse', but there are"),
        ("{}/nowhere", "there is no such file or directory"),
    ],
)
def test_weights_that_are_not_there_are_one_sentence(before: Path, source: str, words: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        frozen_in(config_with(train=False, **{"from": source.format(before)}))
    assert str(wrong.value).startswith(f"modules.old: from = {source.format(before)!r}: ")
    assert words in str(wrong.value)


def test_spaces_that_do_not_fit_are_one_sentence(before: Path) -> None:
    config = config_with(train=False, **{"from": f"{before}:prey"})
    frozen = frozen_modules(config)
    must_fit(config, frozen, [GROUP])
    other = space_to_message(spaces.Discrete(4))
    with pytest.raises(ConfigError) as wrong:
        must_fit(config, frozen, [FoundGroup(("cat", "mouse"), SEES, other)])
    said = str(wrong.value)
    assert said.startswith("modules.old: module 'prey' of ")
    assert "cannot play agent 'mouse': its action space is Discrete(3), and the agent's is" in said


@pytest.mark.parametrize("module_ids", [("hunter", "prey"), ("default",), ("default", "x")])
def test_a_run_keeps_what_it_plays_with_once(tmp_path: Path, module_ids: tuple[str, ...]) -> None:
    save(tmp_path / "before", *module_ids)
    config = config_with(train=False, **{"from": f"{tmp_path / 'before'}:{module_ids[-1]}"})
    module = frozen_in(config)
    config = with_digests(config, {"old": module})
    assert config.agents.modules["old"]["digest"] == module.digest
    module.keep(tmp_path / "run")
    shutil.rmtree(tmp_path / "before")
    with pytest.raises(ConfigError, match="there is no such file"):
        frozen_in(config)
    kept = frozen_in(config, tmp_path / "run")
    assert (kept.digest, kept.source) == (module.digest, module.source)
    assert kept.acting_setup() == module.acting_setup()
    assert list(kept.checkpoint.tree[kept.source]) == ["parameters", "buffers"], "no optimizer"


def test_other_weights_than_the_run_has_played_with_are_refused(before: Path) -> None:
    table = {"train": False, "from": f"{before}:prey"}
    digest = frozen_in(config_with(**table)).digest
    assert frozen_in(config_with(**table, digest=digest)).digest == digest
    with pytest.raises(ConfigError, match="other weights were meant"):
        frozen_in(config_with(**{**table, "from": f"{before}:hunter"}, digest=digest))


def test_a_run_has_its_modules_that_are_not_trained_too(before: Path, tmp_path: Path) -> None:
    table = {"train": False, "from": f"{before}:prey"}
    module = frozen_in(config_with(**table))
    config = with_digests(config_with(**table), {"old": module})
    run = save(tmp_path / "run", "main")
    checkpoint = read(run)
    record = json.loads((checkpoint.path / "checkpoint.json").read_text())  # type: ignore[operator]
    assert "old" not in record["modules"]
    write(
        run / "checkpoints",
        Checkpoint((1, 5), checkpoint.tree, checkpoint.modules, {}, config.flat(), {}),
    )
    # Its directory has them not yet, so they come from where the run had them.
    found, source = module_in(read(run), "old")
    assert source == "prey"
    assert tree_digest(playing_tree(found, source)) == module.digest
    save(before, "prey", "hunter")  # the numbers of both are others now
    with pytest.raises(CheckpointError, match="its weights have changed"):
        module_in(read(run), "old")
    module.keep(run)
    found, source = read_module(f"{run}:old")
    assert tree_digest(playing_tree(found, source)) == module.digest


# -- a module that begins with weights and is trained ---------------------------------------------


def test_a_module_may_begin_with_weights_of_its_own(before: Path, tmp_path: Path) -> None:
    filters = {"connectors": {"env_to_module": ["mean_std_filter"]}}
    table = {"from": f"{before}:prey", **filters}
    config = RunConfig.from_flat({**TABLES, "modules": {"main": table}})
    beginning, warnings = FirstCheckpoints.of(config).beginning(config)
    assert set(beginning) == {"main"}, "the other begins with what the seed gives"
    main = beginning["main"]
    assert float(main.weights["scale"]) == 1
    assert main.whole
    np.testing.assert_equal(main.learned, LEARNED)
    assert not warnings
    said = f"modules.main: from = '{before}:prey'"
    assert (main.source, main.selectable) == (said, False)

    save(tmp_path / "other", "old", "main")
    config = RunConfig.from_flat(
        {**TABLES, "modules": {"main": table}, "from_checkpoint": str(tmp_path / "other")}
    )
    both, warnings = FirstCheckpoints.of(config).beginning(config)
    assert {name: float(each.weights["scale"]) for name, each in both.items()} == {
        "old": 0,
        "main": 1,
    }
    assert len(warnings) == 1, "the connectors of the one are others than there"
    assert {name: (each.source, each.selectable) for name, each in both.items()} == {
        "old": (f"from_checkpoint = '{tmp_path / 'other'}'", True),
        "main": (said, False),
    }


# Runs that begin with what another run has learned.


FILTER = {"env_to_module": ["mean_std_filter"]}
RESCALING = {"module_to_env": ["rescale_actions"]}
PARAMETERS = {"encoder.weight": np.ones((2, 3), np.float32), "head": np.ones(2, np.float32)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of a run that has ended."""
    config = RunConfig.from_flat({"connectors": FILTER})
    checkpoints = tmp_path / "before" / "checkpoints"
    checkpoints.mkdir(parents=True)
    tree: dict[str, Any] = {"default": {"parameters": PARAMETERS, "buffers": {}}}
    core = core_of(config, None)
    counters = counters_of([core.counters()], core.past, core.next_id, Metrics(), Times(0.0, 0.0))
    made = Checkpoint((1, 9), {**tree, "connectors": LEARNED}, {}, counters, config.flat(), {})
    write(checkpoints, made, 3)
    return tmp_path / "before"


def config(saved: Path, **keys: Any) -> RunConfig:
    return RunConfig.from_flat({"connectors": FILTER, "from_checkpoint": str(saved), **keys})


def restored(world: WorkersWorld, learner: Any) -> tuple[Any, training_pb2.Restore]:
    """A learner's commands to restore, and the last part."""
    reader = FrameReader(training_pb2.StateHeader, digests=True)
    parts = [part for _, part in world.asked(learner, training_pb2.Restore)]
    frames = [reader.feed(part.chunk) for part in parts]
    assert frames[-1] is not None
    return frames[-1].tree, parts[-1]


@pytest.mark.parametrize("connectors", [{}, RESCALING])
def test_whether_actions_are_rescaled_is_as_the_other_run_had_it(
    tmp_path: Path, connectors: dict[str, Any]
) -> None:
    before = RunConfig.from_flat({"connectors": connectors}).flat()
    tree: dict[str, Any] = {"default": {"parameters": PARAMETERS, "buffers": {}}}
    module: dict[str, Any] = {"default": {"version": (1, 9), "extra": {}}}
    write(tmp_path / "before", Checkpoint((1, 9), tree, module, {}, before, {}), 1)
    (saved,) = (tmp_path / "before").iterdir()
    had = bool(connectors)
    keys = {"from_checkpoint": str(saved), "connectors": connectors}
    alone = RunConfig.from_flat(keys)
    assert FirstCheckpoints.of(alone).rescaled(alone) == {"default": had}
    tables = {"agents": {"a": "one", "b": "two"}, "modules": {"one": {"from": str(saved)}}}
    several = RunConfig.from_flat({**tables, "modules": {**tables["modules"], "two": {}}})
    own = FirstCheckpoints.of(several)
    assert own.rescaled(several) == {"one": had}
    assert FirstCheckpoints.of(RunConfig()).rescaled(RunConfig()) == {}
    other = RunConfig.from_flat({**keys, "connectors": {} if had else RESCALING})
    _, (warning,) = FirstCheckpoints.of(other).beginning(other)
    assert "connectors.module_to_env differs" in warning
    shutil.rmtree(saved)
    begins, _ = own.beginning(several)
    assert set(begins) == {"one"}, "it reads no checkpoint again"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"from_checkpoint": "nowhere"}, "from_checkpoint = 'nowhere': .*no"),
        ({"from_parameters": ["body.*"]}, "no parameter has a name like"),
    ],
)
def test_what_cannot_be_is_known_before_anything_starts(
    saved: Path, keys: dict[str, Any], words: str
) -> None:
    run_dir = saved.parent / "new"
    with pytest.raises(ConfigError, match=words) as wrong:
        juggler.train(config(saved), run_dir=str(run_dir), **keys)
    assert "\n" not in str(wrong.value)
    assert not run_dir.exists()


def test_every_learner_begins_with_them_until_there_is_a_checkpoint(
    saved: Path, tmp_path: Path
) -> None:
    """A replacement too: otherwise it would begin from the seed."""
    beginning = beginning_of(config(saved))
    world = WorkersWorld(tmp_path, beginning, num_learners=2)
    second = world.joined("learner", 1)
    world.leave(world.learner)
    again = world.join("learner", 0)
    for learner in (world.learner, second, again):
        tree, last = restored(world, learner)
        assert last.source == f"from_checkpoint = {str(saved)!r}"
        assert np.array_equal(tree["default"]["head"], PARAMETERS["head"])
        assert last.weights
        assert last.whole
        (_, first), *_ = world.asked(learner, training_pb2.Restore)
        assert first.state_bytes > 0
    assert world.core.weights_version.update == 0


def test_a_run_that_is_resumed_does_not_begin_with_others_weights(saved: Path) -> None:
    with pytest.raises(ConfigError, match="resumed"):
        juggler.resume(saved, from_checkpoint="elsewhere")


# What a run refuses to continue from.


_GOOD: dict[str, Any] = {
    "sampled": 100,
    "trained": 80,
    "dropped": {"stale": 5, "shutdown": 5},
    "in_flight": 10,
    "lost_unreported": 3,
    "next_id": 12,
    "wall_time": 1.5,
    "episodes": 7,
    "returns": [1.0, -2.0],
    "lengths": [3, 4],
}

_ENDED: dict[str, Any] = {"episodes": 9, "returns": [1.0, 2.0], "lengths": [5, 6]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trained": 81}, "100 steps sampled, but 81 trained"),
        ({"trained": "80"}, "Expected `int`, got `str` - at `$.trained`"),
        ({"trained": 80.5}, "at `$.trained`"),
        ({"sampled": -100}, "`int` >= 0 - at `$.sampled`"),
        ({"next_id": 1 << 80}, "at `$.next_id`"),
        ({"dropped": {"stolen": 10}}, "'stolen'"),
        ({"dropped": [10]}, "at `$.dropped`"),
        ({"wall_time": float("inf")}, "at `$.wall_time`"),
        ({"training_time": float("nan")}, "at `$.training_time`"),
        ({"wall_time": None}, "at `$.wall_time`"),
        ({"returns": [0.0] * 101, "lengths": [1] * 101}, "at `$.returns`"),
        ({"by_module": {"red": {**_ENDED, "returns": [0.0] * 101}}}, "at `$.by_module[...].ret"),
        ({"by_agent": {"red_0": {"episodes": 1}}}, "at `$.by_agent[...]`"),
    ],
)
def test_books_that_nobody_has_kept_are_refused_in_a_sentence(
    changes: dict[str, Any], words: str
) -> None:
    path = Path("run/checkpoints/000000007")
    with pytest.raises(CheckpointError) as refused:
        must_be_sound(Checkpoint((1, 7), {}, {}, {**_GOOD, **changes}, {}, {}, path))
    assert str(refused.value).startswith("checkpoint run/checkpoints/000000007: its counters ")
    assert words in str(refused.value)


# Weights of modules that share parts: equal in a run's checkpoint, or one module's for all.


SHARED = {"encoder.*": ["cat", "mouse"]}
WITH_SHARED: dict[str, Any] = {"agents": {"cat": "cat", "mouse": "mouse"}, "shared": SHARED}


def made(**changes: float) -> Checkpoint:
    """A checkpoint of two modules; keys add to an encoder's buffer."""
    tree = {
        module_id: {
            "parameters": {"encoder.weight": np.ones(2), "head": np.full(2, number)},
            "buffers": {"encoder.mean": np.full(2, changes.get(module_id, 0.0))},
        }
        for number, module_id in enumerate(("cat", "mouse"))
    }
    return Checkpoint(
        (1, 9), tree, {}, {}, RunConfig.from_flat(WITH_SHARED).flat(), {}, Path("here")
    )


def test_a_run_is_resumed_only_where_shared_parts_are_equal() -> None:
    shared_parts_must_agree(made(), SHARED)
    shared_parts_must_agree(made(cat=1.0), {})
    error = (
        r"checkpoint here: has different values of 'encoder\.mean' for modules 'cat' and 'mouse'"
    )
    with pytest.raises(CheckpointError, match=error):
        shared_parts_must_agree(made(cat=1.0), SHARED)


def test_parameters_to_act_with_may_differ_where_the_trained_ones_are_shared() -> None:
    checkpoint = made()
    for number, unit in enumerate(checkpoint.tree.values()):
        acting = {"encoder.weight": np.full(2, number), "head": np.zeros(2)}
        unit["acting"] = acting  # type: ignore[index, call-overload]
    shared_parts_must_agree(checkpoint, SHARED)
    trained, played = weights_of(checkpoint), weights_of(checkpoint, acting=True)
    np.testing.assert_array_equal(trained["mouse"]["head"], [1, 1])
    np.testing.assert_array_equal(played["mouse"]["head"], [0, 0])
    np.testing.assert_array_equal(played["mouse"]["encoder.mean"], [0, 0])


@pytest.mark.parametrize("differs", [False, True])
def test_a_run_that_begins_with_different_ones_says_whose_it_takes(differs: bool) -> None:
    checkpoint = made(cat=float(differs))
    origins = FirstCheckpoints((checkpoint, weights_of(checkpoint)), {})
    _, warnings = origins.beginning(RunConfig.from_flat(WITH_SHARED))
    said = [each for each in warnings if "share 'encoder.mean'" in each]
    assert len(said) == differs
    assert all("of the module that the table agents names last" in each for each in said)
