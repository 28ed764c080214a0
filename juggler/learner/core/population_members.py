"""What the members of a population must be, and how a core becomes one of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from juggler.learner.core.gradient_core import GradientCore
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.structures import tree_map, zeros


def as_member(core: GradientCore, values: Mapping[str, Tensor]) -> GradientCore:
    """A copy of the core for use within `torch.func.vmap`, with values [] by key that replace those
    of its schedules and its config."""
    dtype = next(
        parameter.dtype
        for module in core.modules.values()
        for parameter in module.parameters()
        if parameter.requires_grad
    )
    fixed = {key: x for key, x in values.items() if key in core.schedules}
    # In the dtype of the parameters: like a number, they must not promote the loss.
    numbers: dict[str, Any] = {key: x.to(dtype) for key, x in values.items() if key not in fixed}
    member = copy.copy(core)
    member.mapped = True
    member.config = replace(core.config, **numbers)
    member.schedules = {**core.schedules, **{key: partial(_fixed, x) for key, x in fixed.items()}}
    return member


def _fixed(value: Tensor, steps: Tensor) -> Tensor:
    """A schedule with a constant value []."""
    return value


def numbers_of_members(key: str, values: Sequence[float]) -> list[float]:
    """Raises:
    ValueError: this is not a number for each member.
    """
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        raise ValueError(
            f"hyperparameters: {key} = {values!r}: must be a list with a number for each member"
        ) from None


def check_values(core: GradientCore, key: str, values: Sequence[float]) -> None:
    """Raises:
    ValueError: members cannot differ in this key, or a value is out of range.
    """
    keys = [*core.schedules, *core.config.numbers_of_losses()]
    if key not in keys:
        if getattr(core.config, key, key) is None:
            raise ValueError(
                f"hyperparameters: {key!r} is none in the config of {core.name}; set it there to a "
                "number, so that members may have others"
            )
        raise ValueError(
            f"hyperparameters: members of {core.name} cannot differ in {key!r}{nearest(key, keys)}"
        )
    if hasattr(core.config, key):
        for value in values:
            changed: dict[str, Any] = {key: value}
            try:
                replace(core.config, **changed).validate()
            except ValueError as error:
                raise ValueError(f"hyperparameters: {error}") from None


def check_module(module_id: str, module: RLModule) -> None:
    """Raises:
    ValueError: vmap cannot map a module's training pass.
    """
    what = f"module {module_id!r} ({type(module).__name__})"
    if module.get_initial_state():
        raise ValueError(
            f"{what} has a state, and cannot be in a population: the lengths of its sequences have "
            "to be read from the data. Train its members as separate learners"
        )
    tensors = {
        name: torch.stack([tensor.detach()] * 2)  # [M = 2, ...]
        for name, tensor in chain(module.named_parameters(), module.named_buffers())
    }
    batch = {c.OBSERVATIONS: tree_map(torch.from_numpy, zeros(module.observation_space, (2,)))}

    def forward(tensors: dict[str, Tensor]) -> Any:
        outputs = torch.func.functional_call(module, tensors, (batch,))
        return {name: x for name, x in outputs.items() if isinstance(x, Tensor)}

    try:
        torch.func.vmap(forward)(tensors)
    except RuntimeError as error:
        buffers = [name for name, _ in module.named_buffers()]
        raise ValueError(
            f"{what} cannot be in a population: torch.func.vmap cannot map its training pass"
            f"{f' (its buffers are {buffers})' if buffers else ''}: {error}"
        ) from error
