"""Weights of modules that share parts: equal in a run's checkpoint, or one module's for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from juggler.driver.checkpoint.beginning import OtherRun
from juggler.driver.checkpoint.parts_agree import shared_parts_must_agree
from juggler.driver.config import RunConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError
from juggler.runtime.checkpoints.weights import weights_of

SHARED = {"encoder.*": ["cat", "mouse"]}
CONFIG: dict[str, Any] = {"agents": {"cat": "cat", "mouse": "mouse"}, "shared": SHARED}


def made(**changes: float) -> Checkpoint:
    """A checkpoint of two modules; keys add to the encoder's buffer of a module."""
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
    beginning = OtherRun(checkpoint, weights_of(checkpoint)).beginning(RunConfig.from_flat(CONFIG))
    said = [each for each in beginning.warnings if "share 'encoder.mean'" in each]
    assert len(said) == differs
    assert all("of the module that the table agents names last" in each for each in said)
