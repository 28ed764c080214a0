"""Vectors whose environments give and take tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from torch import Tensor

from support.fake_device import OnFakeDevice


def on_cpu(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy())


def on_fake_device(array: np.ndarray) -> Tensor:
    """As an environment on the device computes it, where nothing is copied."""
    return OnFakeDevice(torch.from_numpy(array.copy()))


class TensorVector(VectorWrapper):
    """The same environments in tensors, which take no arrays.

    Args:
        env: a vector in arrays.
        tensor: makes a tensor of an array.
        infos: numbers [N] of each step, beside those of `env`.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        tensor: Callable[[np.ndarray], Tensor] = on_cpu,
        infos: Callable[[], dict[str, np.ndarray]] = dict,
    ) -> None:
        super().__init__(env)
        self._tensor, self._infos = tensor, infos

    def reset(self, *, seed=None, options=None):
        if options:
            options = {"reset_mask": inner(options["reset_mask"]).numpy()}
        return self._tensors(self.env.reset(seed=seed, options=options))

    def step(self, actions):
        results = self.env.step(self._arrays(actions))
        *given, infos = results
        return self._tensors((*given, {**infos, **self._infos()}))

    def _arrays(self, actions):
        if isinstance(actions, dict):
            return {key: self._arrays(each) for key, each in actions.items()}
        if isinstance(actions, tuple):
            return tuple(map(self._arrays, actions))
        assert isinstance(actions, Tensor), "an array for environments on a device"
        return inner(actions).numpy()

    def _tensors(self, value):
        if isinstance(value, dict):
            return {key: self._tensors(each) for key, each in value.items()}
        if isinstance(value, tuple):
            return tuple(map(self._tensors, value))
        if isinstance(value, np.ndarray) and value.dtype != object:
            return self._tensor(value)
        return value


def inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, OnFakeDevice) else tensor
