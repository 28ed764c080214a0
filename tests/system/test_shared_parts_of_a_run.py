"""Runs whose modules share an encoder: trained by both, and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import juggler
from juggler.driver.config import ConfigError
from juggler.driver.preflight import PreflightError
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.wire.trees import flatten

RUN: dict[str, Any] = {
    "env": "juggler:MatrixGame",
    "agents": {"row": "row", "column": "column"},
    "modules": {"column": {"algorithm": "ppo", "lr": 1e-3}},
    "shared": {"encoder.*": ["row", "column"]},
    "model": {"hidden_sizes": [8]},
    "batch_size": 64,
    "num_env_runners": 1,
    "progress": "off",
}
EXACT: dict[str, Any] = {**RUN, "synchronous": True, "checkpoint_updates": 4}


def parts(tree: Mapping[str, Any], module_id: str, prefix: str) -> dict[str, Any]:
    """A module's parameters with this prefix, and their moments."""
    own = tree[module_id]
    branches = {"parameters": own["parameters"], **own["moments"]}
    return {
        f"{branch} {name}": array
        for branch, arrays in branches.items()
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def counts(tree: Mapping[str, Any], module_id: str, prefix: str) -> set[float]:
    """Number of updates of these parameters."""
    found = parts(tree, module_id, f"{prefix}")
    return {float(x) for name, each in found.items() if name[:7] == "updates" for x in each.flat}


def assert_encoders_are_equal(run_dir: Path) -> Mapping[str, Any]:
    tree = read(run_dir).tree
    row, column = (parts(tree, each, "encoder.") for each in ("row", "column"))
    assert len(row) > 4
    np.testing.assert_equal(row, column)
    heads = (parts(tree, each, "policy_head.") for each in ("row", "column"))
    one, other = (each["parameters policy_head.weight"] for each in heads)
    assert not np.array_equal(one, other)
    return tree


@pytest.mark.slow
def test_a_resumed_synchronous_run_equals_one_without_a_break(tmp_path: Path) -> None:
    whole = juggler.train(**EXACT, stop_steps=1500, run_dir=str(tmp_path / "whole"))
    names = sorted(each.name for each in (tmp_path / "whole" / "checkpoints").glob("0*"))
    half = read(tmp_path / "whole" / "checkpoints" / names[0])
    juggler.train(**EXACT, stop_steps=half.counters["trained"], run_dir=str(tmp_path / "broken"))
    at_half = read(tmp_path / "broken")
    assert flatten_equal(at_half.tree, half.tree), "a second run of the same seed"
    juggler.resume(tmp_path / "broken", stop_steps=1500)
    end = read(whole.run_dir)
    assert end.counters["trained"] > half.counters["trained"]
    assert flatten_equal(read(tmp_path / "broken").tree, end.tree)

    tree = assert_encoders_are_equal(whole.run_dir)
    steps = {each: counts(tree, each, "policy_head.") for each in ("row", "column")}
    assert all(len(each) == 1 for each in steps.values())
    (shared,) = counts(tree, "row", "encoder.")
    assert shared == sum(min(each) for each in steps.values()), "both have trained it"
    with pytest.raises(ConfigError, match="share"):
        juggler.resume(tmp_path / "broken", stop_steps=3000, shared={"*": ["row", "column"]})


def flatten_equal(one: Any, other: Any) -> bool:
    first, second = dict(flatten(one)), dict(flatten(other))
    return first.keys() == second.keys() and all(
        np.array_equal(first[path], second[path]) for path in first
    )


@pytest.mark.slow
def test_what_modules_cannot_share_is_said_before_the_run_has_a_directory(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    error = r"shared: 'encodr\.\*' matches no parameter of module 'row'"
    with pytest.raises(PreflightError, match=error):
        juggler.train(**{**RUN, "shared": {"encodr.*": ["row", "column"]}}, run_dir=run_dir)
    with pytest.raises(ConfigError, match="'colum'"):
        juggler.train(**{**RUN, "shared": {"encoder.*": ["row", "colum"]}}, run_dir=run_dir)
    assert not (tmp_path / "run").exists()
