"""What a run refuses to continue from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from juggler.driver.checkpoint.first_weights import FirstCheckpoints, shared_parts_must_agree
from juggler.driver.checkpoint.snapshots import (
    checkpoint_tree,
    must_be_sound,
    restore_commands,
    state_reader,
)
from juggler.driver.config import RunConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError
from juggler.runtime.checkpoints.weights import weights_of

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


def _checkpoint(counters: dict[str, Any]) -> Checkpoint:
    return Checkpoint((1, 7), {}, {}, counters, {}, {}, Path("run/checkpoints/000000007"))


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
    with pytest.raises(CheckpointError) as refused:
        must_be_sound(_checkpoint({**_GOOD, **changes}))
    assert str(refused.value).startswith("checkpoint run/checkpoints/000000007: its counters ")
    assert words in str(refused.value)


_SHARED = ("connectors", "learner_pipelines")


def _state(value: float) -> dict[str, Any]:
    """A state as a learner saves it, with extras of its core."""
    unit = {"parameters": {"w": np.full(2, value)}}
    pipelines = {"default": {"seen": np.full(1, value)}}
    return {"default": unit, "clock": np.full(1, value), "learner_pipelines": pipelines}


def test_each_module_of_a_checkpoint_goes_on_from_its_own_state() -> None:
    values = {"default": 1.0, "rival": 2.0, "third": 3.0}
    states = {module_id: _state(value) for module_id, value in values.items()}
    tree = checkpoint_tree(states, {"default": {}, "rival": {"filter": {}}, "third": {}})
    assert tree.keys() == {*values, "clock", "rival:clock", "third:clock", *_SHARED}
    assert tree["connectors"] == {"rival": {"filter": {}}}
    modules: dict[str, Any] = {
        module_id: {"version": [1, 7], "extra": {"updates": int(value)}}
        for module_id, value in values.items()
    }
    checkpoint = Checkpoint((1, 7), tree, modules, {}, {}, {}, Path("here"))
    for module_id, value in values.items():
        commands = list(restore_commands(module_id, checkpoint))
        assert {each.module_id for each in commands} == {module_id}
        assert commands[0].state_bytes > 0
        assert [each.last for each in commands] == [False] * (len(commands) - 1) + [True]
        reader = state_reader()
        frame = [reader.feed(each.chunk) for each in commands][-1]
        assert frame is not None
        np.testing.assert_equal(frame.tree, _state(value))
        assert frame.header.extra == f'{{"updates": {int(value)}}}'
    with pytest.raises(CheckpointError, match="module 'stranger'"):
        next(restore_commands("stranger", checkpoint))


# Weights of modules that share parts: equal in a run's checkpoint, or one module's for all.


SHARED = {"encoder.*": ["cat", "mouse"]}
CONFIG: dict[str, Any] = {"agents": {"cat": "cat", "mouse": "mouse"}, "shared": SHARED}


def made(**changes: float) -> Checkpoint:
    """A checkpoint of two modules; keys add to an encoder's buffer."""
    tree = {
        module_id: {
            "parameters": {"encoder.weight": np.ones(2), "head": np.full(2, number)},
            "buffers": {"encoder.mean": np.full(2, changes.get(module_id, 0.0))},
        }
        for number, module_id in enumerate(("cat", "mouse"))
    }
    return Checkpoint((1, 9), tree, {}, {}, RunConfig.from_flat(CONFIG).flat(), {}, Path("here"))


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
    _, warnings = origins.beginning(RunConfig.from_flat(CONFIG))
    said = [each for each in warnings if "share 'encoder.mean'" in each]
    assert len(said) == differs
    assert all("of the module that the table agents names last" in each for each in said)
