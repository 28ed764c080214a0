"""A device for tests, whose tensors are on the CPU but behave as those of a GPU do."""

from __future__ import annotations

from typing import Any

import torch
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


def _there(value: Any) -> Any:
    return OnFakeDevice(value) if isinstance(value, Tensor) else value
