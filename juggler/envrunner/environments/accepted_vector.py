"""A vector of environments that steps and resets them in its own way, in arrays or in tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from torch import Tensor

from juggler.envrunner.failures import ReportsFailures
from juggler.runtime.wire.structures import to_tree, tree_leaves


class AcceptedVector(ReportsFailures, VectorWrapper):
    """Reports failures, and gives arrays whatever the environments compute in.

    Environments that are computed on a device take tensors and give tensors. A step with arrays
    copies them in both directions. A step with tensors is the environments' own: everything stays
    on their device.

    Args:
        env: the vector.
        where: its name in errors.

    Attributes:
        device: of the tensors that the last reset gave; None: it gave arrays.
    """

    def __init__(self, env: Any, where: str) -> None:
        super().__init__(env)
        self.where = where
        self.device: torch.device | None = None

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        options = arguments.get("options")
        if self.device is not None and options:
            arguments["options"] = on_device(options, self.device)
        observations, infos = super().reset(**arguments)
        self.device = device_of(self.env.single_observation_space, observations)
        return (observations, infos) if self.device is None else on_host((observations, infos))

    def step(self, actions: Any) -> Any:
        if self.device is None or holds_tensors(actions):
            return super().step(actions)
        return on_host(super().step(on_device(actions, self.device)))


def tensors_on(env: VectorEnv[Any, Any, Any]) -> torch.device | None:
    """The device of the tensors that environments have given; None: they gave arrays, or have not
    been reset."""
    while isinstance(env, VectorWrapper):
        if isinstance(env, AcceptedVector):
            return env.device
        env = env.env
    return None


def device_of(space: gymnasium.Space[Any], observations: Any) -> torch.device | None:
    """The device of observations that are tensors; None if they are arrays."""
    _, first = next(tree_leaves(to_tree(space, observations)))
    return first.device if isinstance(first, Tensor) else None


def holds_tensors(value: Any) -> bool:
    """Whether actions, a structure of a space, are tensors."""
    while isinstance(value, Mapping | tuple):
        value = next(iter(value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Tensor)


def on_host(value: Any) -> Any:
    """A structure of dicts and tuples, with arrays in place of tensors."""

    def moved(each: Any) -> Any:
        return each.detach().cpu().numpy() if isinstance(each, Tensor) else each

    return with_leaves(moved, value)


def on_device(value: Any, device: torch.device) -> Any:
    """A structure of dicts and tuples, with tensors on a device in place of arrays."""

    def moved(each: Any) -> Any:
        return torch.as_tensor(each, device=device) if isinstance(each, np.ndarray) else each

    return with_leaves(moved, value)


def with_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A structure of dicts and tuples, as Gymnasium's spaces have them, with what the function
    makes of each of its leaves."""
    if isinstance(value, Mapping):
        return {key: with_leaves(function, each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(with_leaves(function, each) for each in value)
    return function(value)
