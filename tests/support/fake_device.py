"""A device for tests, whose tensors are on the CPU, and vectors of environments in tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = torch.device("privateuseone:0")

if not hasattr(torch, "privateuseone"):
    _setup_privateuseone_for_python_backend()


class OnFakeDevice(Tensor):
    """A tensor on the device. Only copies reach its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnFakeDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"OnFakeDevice({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} outside of FakeDevice")


class FakeDevice(TorchDispatchMode):
    """Within it, tensors can be copied to DEVICE, and stay there until they are copied back.

    As on a GPU, an operation with tensors of two devices is an error, unless one has no dimensions.

    Attributes:
        to_host: how often something was copied to the host, or asked for there.
        to_device: how often something was copied to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_host = self.to_device = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        there = [each for each in tensors if isinstance(each, OnFakeDevice)]
        aten = torch.ops.aten
        packet = function.overloadpacket
        goes = kwargs.pop("device", None) if "device" in kwargs else None
        target = None if goes is None else torch.device(goes).type
        inner = tree_map(_inner, args), tree_map(_inner, kwargs)
        if packet is aten.copy_:
            into, source = args[:2]
            self._count(isinstance(into, OnFakeDevice), isinstance(source, OnFakeDevice))
            _inner(into).copy_(_inner(source))
            return into
        if packet in (aten._local_scalar_dense, aten.item, aten.nonzero, aten.equal):
            self.to_host += bool(there)
        result = function(*inner[0], **inner[1])
        if packet is aten._to_copy:
            lands = bool(there) if target is None else target == DEVICE.type
            self._count(lands, bool(there))
            return OnFakeDevice(result) if lands else result
        if target == DEVICE.type:
            return OnFakeDevice(result)
        if not there:
            return result
        odd = [each for each in tensors if not isinstance(each, OnFakeDevice) and each.ndim]
        assert not odd, f"{function}: tensors are on two devices"
        if function._schema.is_mutable:
            return args[0]
        return tree_map(
            lambda each: OnFakeDevice(each) if isinstance(each, Tensor) else each, result
        )

    def _count(self, lands: bool, comes: bool) -> None:
        self.to_host += comes and not lands
        self.to_device += lands and not comes


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnFakeDevice) else value


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
