"""What training changes, by unit; and the same by the names of parameters, for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from juggler.learner.optim.optimizers import Moments
from juggler.learner.optim.parameter_group import Unit


class UnitState(TypedDict):
    """All that training changes about one unit. None of these tensors is changed in place."""

    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]
    moments: Moments  # of the optimizer
    extra: dict[str, Tensor]  # what the algorithm keeps beside: 0-d, or [P] for each parameter
    steps: Tensor  # [] int64: live steps trained on, of the module with most; schedules follow it


#: By unit.
State = dict[str, UnitState]


def by_name(units: Mapping[str, Unit], state: State) -> dict[str, Any]:
    """A state with every flat vector taken apart into parameters."""
    named: dict[str, Any] = {}
    for unit_id, unit in state.items():
        apart = units[unit_id].named
        named[unit_id] = {
            "parameters": apart(unit["parameters"]),
            "buffers": unit["buffers"],
            "moments": {name: apart(x) if x.ndim else x for name, x in unit["moments"].items()},
            "extra": {name: apart(x) if x.ndim else x for name, x in unit["extra"].items()},
            "steps": unit["steps"],
        }
    return named


def from_names(named: Mapping[str, Any]) -> State:
    """The other way round."""
    return {
        unit_id: UnitState(
            parameters=_joined(unit["parameters"]),
            buffers=unit["buffers"],
            moments={name: _joined(moment) for name, moment in unit["moments"].items()},
            extra={name: _joined(each) for name, each in unit["extra"].items()},
            steps=unit["steps"],
        )
        for unit_id, unit in named.items()
    }


def _joined(tensors: Tensor | dict[str, Tensor]) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    return torch.cat([piece.reshape(-1) for piece in tensors.values()])  # [P]
