"""The weights in a checkpoint, all of them or by patterns of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.made_checkpoints import checkpoint

import juggler
from juggler.driver.record.checkpoints import write
from juggler.runtime.checkpoints.weights import NoSuchWeights


def unit(**parameters: float) -> dict[str, Any]:
    """A unit's part of a state, as a learner saves it."""
    arrays = {name.replace("__", "."): np.full(2, x) for name, x in parameters.items()}
    return {"parameters": arrays, "buffers": {}, "moments": {"mean": arrays}, "steps": np.array(3)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tree = {"default": {**unit(encoder__weight=1, head=2), "buffers": {"encoder.seen": np.ones(1)}}}
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    write(
        checkpoints, checkpoint(tree={**tree, "connectors": {"filter": {"count": np.ones(1)}}}), 3
    )
    return tmp_path


def test_all_of_them_are_parameters_and_buffers_by_module(run_dir: Path) -> None:
    weights = juggler.read_weights(run_dir)
    assert weights.keys() == {"default"}
    assert sorted(weights["default"]) == ["encoder.seen", "encoder.weight", "head"]
    assert weights["default"]["head"].tolist() == [2, 2]


@pytest.mark.parametrize("pattern", ["encoder.*", "default:encoder.*"])
def test_patterns_choose_some_of_them(run_dir: Path, pattern: str) -> None:
    weights = juggler.read_weights(run_dir, [pattern])
    assert sorted(weights["default"]) == ["encoder.seen", "encoder.weight"]


def test_a_pattern_that_names_nothing_is_an_error_that_lists_what_there_is(run_dir: Path) -> None:
    with pytest.raises(NoSuchWeights, match=r"like 'encodr\.\*'"):
        juggler.read_weights(run_dir, ["head", "encodr.*"])


def test_modules_that_share_parameters_have_each_their_own_names(tmp_path: Path) -> None:
    joint = unit(**{"left:encoder": 1, "left:head": 2, "right:head": 3})
    write(tmp_path, checkpoint(tree={"left+right": joint, "alone": unit(head=4)}), 3)
    weights = juggler.read_weights(tmp_path, ["head", "left:encoder"])
    found = {key: {name: x[0] for name, x in own.items()} for key, own in weights.items()}
    assert found == {
        "left": {"encoder": 1, "head": 2},
        "right": {"head": 3},
        "alone": {"head": 4},
    }
    assert juggler.read_weights(tmp_path, ["right:*"]).keys() == {"right"}


def test_a_checkpoint_without_parameters_by_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path, checkpoint(tree={"connectors": {}, "other": {"state": np.ones(1)}}), 3)
    with pytest.raises(juggler.CheckpointError, match="has no parameters by name"):
        juggler.read_weights(tmp_path)
