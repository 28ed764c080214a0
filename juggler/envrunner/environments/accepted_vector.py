"""Checks the results of a vector with its own `step` and `reset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from torch import Tensor

from juggler.envrunner.environments.environments_in_turn import keep_own_finals
from juggler.envrunner.failures import EnvironmentFailed, failures_of
from juggler.runtime.wire.structures import space_leaves, to_tree, tree_leaves
from juggler.runtime.wire.trees import path_name


class AcceptedVector(VectorWrapper):
    """Reports failures and misfits of a vector.

    Environments on a device take and return tensors. A step with arrays copies them in both
    directions. In a step with tensors, everything stays on the device.

    Args:
        where: its name in errors.
    """

    def __init__(self, env: Any, where: str) -> None:
        super().__init__(env)
        self.where = where
        # Of the tensors that the last reset returned; None: it returned arrays.
        self.device: torch.device | None = None
        keep_own_finals(env)
        self._fitted: dict[int, list[Any]] = {}  # last dtypes and shapes, by number of results

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        options = arguments.get("options")
        if self.device is not None and options:
            arguments["options"] = on_device(options, self.device)
        with failures_of(self.where, "reset"):
            observations, infos = self.env.reset(**arguments)
        self._check("reset", observations)
        self.device = device_of(self.env.single_observation_space, observations)
        return (observations, infos) if self.device is None else on_host((observations, infos))

    def step(self, actions: Any) -> Any:
        device = self.device
        if device is not None and holds_tensors(actions):
            device = None  # they are on the device already
        sent = actions if device is None else on_device(actions, device)
        with failures_of(self.where, "step"):
            *given, infos = self.env.step(sent)
        self._check("step", *given)
        # Bools stay as they are.
        ends = (
            each.bool() if isinstance(each, Tensor) else np.asarray(each, np.bool_)
            for each in given[2:]
        )
        results = *given[:2], *ends, infos
        return results if device is None else on_host(results)

    def _check(self, call: str, observations: Any, *results: Any) -> None:
        """Check dtypes and shapes of the results of a call.

        They are written into arrays [N, ...], where NumPy would repeat a single row for all
        environments, and truncate numbers.

        Args:
            observations: a structure of the space, [N, ...].
            results: of a step: rewards [N], terminated [N], and truncated [N].
        """
        space = self.env.single_observation_space
        try:
            leaves = [leaf for _, leaf in tree_leaves(to_tree(space, observations))]
        except Exception as error:
            raise self._other_parts(call, f"{type(error).__name__}: {error}") from None
        arrays = [
            each if hasattr(each, "shape") else np.asarray(each) for each in (*leaves, *results)
        ]
        form = [(each.dtype, each.shape) for each in arrays]
        if form == self._fitted.get(len(results)):  # in all calls but the first
            return
        # Only the first call comes this far, or a wrong one.
        observed, rows = list(self._observed()), self.env.num_envs
        if len(leaves) != len(observed):
            raise self._other_parts(call, f"{len(leaves)} arrays")
        ends = [(name, (rows,), np.dtype(np.bool_)) for name in ("terminated", "truncated")]
        due = [*observed, ("rewards", (rows,), np.dtype(np.float32)), *ends]
        for (name, shape, dtype), (its_dtype, its_shape) in zip(due, form, strict=False):
            if tuple(its_shape) != shape or not _becomes(its_dtype, dtype):
                raise EnvironmentFailed(
                    self.where,
                    call,
                    f"its {name} are {its_dtype} of shape {list(its_shape)}: a vector of "
                    f"{rows} must give {dtype} of shape {list(shape)}",
                )
        self._fitted[len(results)] = form

    def _observed(self) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """Yield name, shape and dtype of each leaf of the observations."""
        for path, leaf in space_leaves(self.env.single_observation_space):
            at = f" at {path_name(path)}" if path else ""
            shape: tuple[int, ...] = leaf.shape or ()
            yield f"observations{at}", (self.env.num_envs, *shape), np.dtype(leaf.dtype)

    def _other_parts(self, call: str, found: str) -> EnvironmentFailed:
        space = self.env.single_observation_space
        reason = f"its observations have other parts than {space}: {found}"
        return EnvironmentFailed(self.where, call, reason)


def _becomes(given: Any, due: np.dtype[Any]) -> bool:
    """Return whether one dtype converts to another without changing its kind.

    The dtypes are NumPy's or torch's. Flags may be numbers or objects.
    """
    if isinstance(given, torch.dtype):
        # NumPy does not have all of torch's floating-point numbers.
        whole = torch.float32 if given.is_floating_point else given
        given = torch.empty(0, dtype=whole).numpy().dtype
    flags = due == np.bool_ and given.kind in "iufO"
    return flags or np.can_cast(given, due, "same_kind")


def tensors_on(env: VectorEnv[Any, Any, Any]) -> torch.device | None:
    """Return the device of environments' tensors; None: arrays, or no reset yet."""
    while isinstance(env, VectorWrapper):
        if isinstance(env, AcceptedVector):
            return env.device
        env = env.env
    return None


def device_of(space: gymnasium.Space[Any], observations: Any) -> torch.device | None:
    """Return the device of observations; None if they are arrays."""
    _, first = next(tree_leaves(to_tree(space, observations)))
    return first.device if isinstance(first, Tensor) else None


def holds_tensors(value: Any) -> bool:
    """Return whether actions, a structure of a space, are tensors."""
    while isinstance(value, Mapping | tuple):
        value = next(iter(value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Tensor)


def on_host(value: Any) -> Any:
    """Replace tensors by arrays in a structure of dicts and tuples."""

    def moved(each: Any) -> Any:
        return each.detach().cpu().numpy() if isinstance(each, Tensor) else each

    return with_leaves(moved, value)


def on_device(value: Any, device: torch.device) -> Any:
    """Replace arrays by tensors in a structure of dicts and tuples."""

    def moved(each: Any) -> Any:
        return torch.as_tensor(each, device=device) if isinstance(each, np.ndarray) else each

    return with_leaves(moved, value)


def with_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the leaves of dicts and tuples."""
    if isinstance(value, Mapping):
        return {key: with_leaves(function, each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(with_leaves(function, each) for each in value)
    return function(value)
