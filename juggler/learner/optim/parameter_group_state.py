"""The state of a parameter group, and its form in a checkpoint, by parameters' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from juggler.learner.optim.optimizers import Moments
from juggler.learner.optim.parameter_group import ParameterGroup
from juggler.runtime.wire.structures import tree_map


class ParameterGroupState(TypedDict):
    """All that training changes of one parameter group. On the CPU, an optimizer step changes
    vectors in place; see `LearnerCore`."""

    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]
    moments: Moments  # of the optimizer
    extra: dict[str, Tensor]  # the algorithm's own: 0-d, or [P]
    steps: Tensor  # [] int64: live steps trained on, of the module with most; for schedules


#: By parameter group.
State = dict[str, ParameterGroupState]


def by_name(groups: Mapping[str, ParameterGroup], state: State) -> dict[str, Any]:
    """A state with every flat vector split into parameters."""
    named: dict[str, Any] = {}
    for group_id, group in state.items():
        apart = groups[group_id].named
        named[group_id] = {
            "parameters": apart(group["parameters"]),
            "buffers": group["buffers"],
            "moments": {name: apart(x) if x.ndim else x for name, x in group["moments"].items()},
            "extra": {name: apart(x) if x.ndim else x for name, x in group["extra"].items()},
            "steps": group["steps"],
        }
    return named


def from_names(named: Mapping[str, Any]) -> State:
    """The inverse of `by_name`."""
    return {
        group_id: ParameterGroupState(
            parameters=_joined(group["parameters"]),
            buffers=group["buffers"],
            moments={name: _joined(moment) for name, moment in group["moments"].items()},
            extra={name: _joined(each) for name, each in group["extra"].items()},
            steps=group["steps"],
        )
        for group_id, group in named.items()
    }


def _joined(tensors: Tensor | dict[str, Tensor]) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    return ParameterGroup.joined(tensors)  # [P]


def copied(state: State) -> State:
    """The state in tensors of its own: optimizer steps change these, and not the old ones."""
    copy: State = tree_map(torch.clone, state)
    return copy


def with_steps(state: State, steps: Mapping[str, Tensor]) -> State:
    """The state with other counts of steps [] of some parameter groups."""
    changed = {
        key: ParameterGroupState(**{**state[key], "steps": each}) for key, each in steps.items()
    }
    return {**state, **changed}


def counting_each(state: ParameterGroupState) -> ParameterGroupState:
    """The state with counts of each parameter's updates, because an update may change only some."""
    parameters = state["parameters"]
    moments = {
        name: moment.expand_as(parameters).to(parameters.dtype, copy=True)
        for name, moment in state["moments"].items()
    }
    return ParameterGroupState(**{**state, "moments": moments})
