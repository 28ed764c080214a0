"""The default specs of a module's inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTIONS,
    CRITIC_OBSERVATIONS,
    OBSERVATIONS,
    STATES,
    VALUES,
)
from juggler.runtime.modules.distributions import DistributionSpec
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.specs import AnyOf, Maybe, Spec, TensorSpec
from juggler.runtime.wire.structures import space_leaves, tree_map
from juggler.runtime.wire.trees import Path


def input_spec(
    observation_space: gymnasium.Space[Any],
    state: Mapping[str, Any],
    critic_space: gymnasium.Space[Any] | None = None,
) -> Spec:
    """Observations of the space, those of the critic if it has its own, and the state if there is
    one."""
    leading = "b, t" if state else "b"
    observed = {OBSERVATIONS: observation_space}
    if critic_space is not None:
        observed[CRITIC_OBSERVATIONS] = critic_space
    specs = {
        name: _tree(
            [
                (path, _spec(leading, leaf.shape or (), leaf.dtype))
                for path, leaf in space_leaves(space)
            ]
        )
        for name, space in observed.items()
    }
    return {**specs, **_states(state)}


def output_spec(
    action_space: gymnasium.Space[Any],
    action_distribution: Callable[[], DistributionSpec],
    state: Mapping[str, Any],
) -> Spec:
    """Acting needs actions or inputs of their distribution, and the state after the step."""
    return [AnyOf(_acting(action_space, action_distribution, state)), _states(state)]


def training_output_spec(
    action_space: gymnasium.Space[Any],
    action_distribution: Callable[[], DistributionSpec],
    state: Mapping[str, Any],
) -> Spec:
    """The algorithm decides what it needs; this describes the outputs that are present."""
    outputs = _acting(action_space, action_distribution, state)
    outputs[VALUES] = _spec("b, t" if state else "b", (), "floating")
    return {**{name: Maybe(spec) for name, spec in outputs.items()}, **_states(state)}


def _acting(
    action_space: gymnasium.Space[Any],
    action_distribution: Callable[[], DistributionSpec],
    state: Mapping[str, Any],
) -> dict[str, Spec]:
    leading = "b, t" if state else "b"
    leaves = space_leaves(action_space)
    specs: dict[str, Spec] = {
        ACTIONS: _tree([(path, _spec(leading, leaf.shape or (), None)) for path, leaf in leaves])
    }
    try:
        size = action_distribution().inputs_size
    except UnsupportedSpace:
        return specs  # a module for this space has to choose actions itself
    return {ACTION_DIST_INPUTS: _spec(leading, (size,), "floating"), **specs}


def _states(state: Mapping[str, Any]) -> dict[str, Spec]:
    if not state:
        return {}
    return {STATES: tree_map(lambda leaf: _spec("b", leaf.shape, leaf.dtype), state)}


def _spec(leading: str, shape: tuple[int, ...], dtype: Any) -> TensorSpec:
    return TensorSpec(", ".join([leading, *map(str, shape)]), dtype=dtype)


def _tree(specs: list[tuple[Path, TensorSpec]]) -> Spec:
    if specs[0][0] == ():
        return specs[0][1]
    root: dict[str, Any] = {}
    for path, spec in specs:
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = spec
    return root
