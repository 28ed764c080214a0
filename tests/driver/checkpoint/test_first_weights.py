"""Runs that begin with what another run has learned."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.beginnings import beginning_of
from support.workers_world import WorkersWorld

import juggler
from juggler.driver.checkpoint.first_weights import FirstCheckpoints
from juggler.driver.checkpoint.snapshots import core_of, counters_of
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.reporting.metrics import Metrics
from juggler.driver.run_end import Times
from juggler.runtime.checkpoints.checkpoint import Checkpoint, write
from juggler.runtime.connectors.mergeable_state import Moments
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import training_pb2

FILTER = {"env_to_module": ["mean_std_filter"]}
RESCALING = {"module_to_env": ["rescale_actions"]}
PARAMETERS = {"encoder.weight": np.ones((2, 3), np.float32), "head": np.ones(2, np.float32)}
LEARNED = {"mean_std_filter": Moments(np.array(3.0), np.ones(2), np.ones(2)).to_tree()}


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
    reader = FrameReader(training_pb2.StateHeader, Limits(), digests=True)
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
