"""One step of acting with any module, with or without a state, with or without a distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, OBSERVATIONS, STATES
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree

Forward = Callable[[Any], dict[str, Any]]


def one_step(forward: Forward, observations: Any, states: Any) -> tuple[dict[str, Any], Any]:
    """One step of a module with a state, which takes and returns sequences [N, T = 1, ...].

    Args:
        forward: one of its passes.
        observations: a tree of tensors [N, ...].
        states: before the step, [N, ...].

    Returns:
        "actions" and "action_dist_inputs" [N, ...], as far as the module returns them, and the
            states after the step.
    """
    sequences = tree_map(lambda leaf: leaf.unsqueeze(1), observations)  # [N, 1, ...]
    outputs = forward({OBSERVATIONS: sequences, STATES: states})
    chosen: dict[str, Any] = {
        name: tree_map(lambda leaf: leaf.squeeze(1), outputs[name])  # [N, ...]
        for name in (ACTIONS, ACTION_DIST_INPUTS)
        if name in outputs
    }
    return chosen, outputs[STATES]


def initial_states(module: RLModule, rows: int) -> Any:
    """A module's states at the start of episodes, [N, ...]; {} if it has none."""
    return tree_map(
        lambda state: state.detach().expand(rows, *state.shape).clone(), module.get_initial_state()
    )


def restarted(states: Any, initial: Any, first: Tensor) -> Any:
    """States [N, ...], replaced by the initial ones where an episode starts.

    Args:
        states: a tree of tensors.
        initial: likewise.
        first: [N] bool, where an episode starts.
    """
    return tree_map(
        lambda start, state: torch.where(first.view(-1, *[1] * (state.ndim - 1)), start, state),
        initial,
        states,
    )


def best_actions(module: RLModule, outputs: Mapping[str, Any]) -> Any:
    """The most likely actions, given what a pass returned -> a tree of tensors [N, ...]."""
    if ACTIONS in outputs:
        return outputs[ACTIONS]
    return module.action_distribution()(outputs[ACTION_DIST_INPUTS]).mode()


def weights_of(module: RLModule) -> dict[str, Tensor]:
    """A module's own parameters and buffers, under the names that a learner uses."""
    return {
        name: tensor.detach()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def load_weights(into: Mapping[str, Tensor], weights: Tree) -> None:
    """Copy arrays into tensors of the same names, which keep their dtypes.

    Raises:
        ValueError: the weights belong to another module.
    """
    if not isinstance(weights, Mapping):
        raise ValueError("weights are one array, not arrays by name")
    if odd := weights.keys() ^ into.keys():
        raise ValueError(f"weights are another module's: only one side has {sorted(odd)}")
    for name, mine in into.items():
        tensor = _tensor(weights[name])  # [...]
        if tensor.shape != mine.shape:
            raise ValueError(
                f"weights are another module's: {name!r} has shape {list(tensor.shape)}, "
                f"here {list(mine.shape)}"
            )
        mine.copy_(tensor)


def _tensor(array: Any) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:  # torch does not take it from NumPy
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)  # [...]
    return torch.tensor(array)  # [...]
