"""Policies in checkpoints of several modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support import worlds

import juggler
from juggler.driver.config import RunConfig
from juggler.driver.record.checkpoints import write
from juggler.runtime.checkpoints.checkpoint import CheckpointError, read

FILTER = {"env_to_module": ["mean_std_filter"]}
KEYS: dict[str, dict[str, Any]] = {
    "red": {"model": {"hidden_sizes": [8]}},
    "blue": {"model": {"hidden_sizes": [16]}, "connectors": FILTER, "distribution": "none"},
}


@pytest.fixture
def several(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """A checkpoint of two modules, and two of runs that trained one of them alone."""
    env = {"red": worlds.plain, "blue": worlds.motors}
    alone = {
        name: worlds.written(tmp_path / name, env[name], **KEYS[name] | {"distribution": None})
        for name in KEYS
    }
    saved = {name: read(path) for name, path in alone.items()}
    tree: dict[str, Any] = {name: each.tree["default"] for name, each in saved.items()}
    tree["connectors"] = {"blue": saved["blue"].tree["connectors"]}
    modules = {
        name: {"version": (1, 1), "extra": {}, "spaces": each.spaces}
        for name, each in saved.items()
    }
    tables = {"agents": {"r": "red", "b": "blue"}, "modules": KEYS}
    config = RunConfig.from_flat({"env": "nowhere:Game", **tables}).flat()
    merged = replace(saved["red"], tree=tree, modules=modules, config=config, spaces={})
    return write(tmp_path / "both" / "checkpoints", merged), alone


@pytest.mark.parametrize("name", KEYS)
def test_a_module_of_several_acts_as_if_it_were_the_only_one(
    several: tuple[Path, dict[str, Path]], name: str
) -> None:
    together, alone = several
    policy = juggler.load_policy(together, module_id=name)
    expected = juggler.load_policy(alone[name])
    assert policy.observation_space == expected.observation_space
    assert policy.action_space == expected.action_space
    seen = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.testing.assert_array_equal(policy.act(seen)[0], expected.act(seen)[0])


def test_which_module_is_asked_where_there_are_several(
    several: tuple[Path, dict[str, Path]],
) -> None:
    together, alone = several
    with pytest.raises(CheckpointError, match="'red'"):
        juggler.load_policy(together)
    with pytest.raises(CheckpointError, match="module 'green'"):
        juggler.load_policy(together, module_id="green")
    with pytest.raises(ValueError, match="'red'"):
        juggler.load_policy(together, module="red")
    juggler.load_policy(alone["red"], module_id="default")


@pytest.mark.parametrize("name", KEYS)
def test_each_module_is_an_onnx_model(
    several: tuple[Path, dict[str, Path]], name: str, tmp_path: Path
) -> None:
    policy = juggler.load_policy(several[0], module_id=name)
    model = onnxruntime.InferenceSession(policy.export_onnx(tmp_path / f"{name}.onnx"))
    seen = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)
    (action,) = model.run(["action"], {"observation": seen})
    np.testing.assert_allclose(action, policy.act(seen)[0], rtol=1e-5, atol=1e-5)
