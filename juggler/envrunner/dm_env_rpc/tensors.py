"""Tensors and their specs, as dm_env_rpc sends them, and NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb

#: Bytes of one message: observations may be images.
MAX_MESSAGE_BYTES: Final = 256 << 20
#: Elements of one tensor.
MAX_ELEMENTS: Final = 1 << 25

#: By DataType: the field of a Tensor that has its numbers, and their dtype.
_NUMBERS: Final[dict[pb.DataType, tuple[str, np.dtype[Any]]]] = {
    pb.FLOAT: ("floats", np.dtype("<f4")),
    pb.DOUBLE: ("doubles", np.dtype("<f8")),
    pb.INT8: ("int8s", np.dtype(np.int8)),
    pb.INT32: ("int32s", np.dtype("<i4")),
    pb.INT64: ("int64s", np.dtype("<i8")),
    pb.UINT8: ("uint8s", np.dtype(np.uint8)),
    pb.UINT32: ("uint32s", np.dtype("<u4")),
    pb.UINT64: ("uint64s", np.dtype("<u8")),
    pb.BOOL: ("bools", np.dtype(np.bool_)),
}
_FIELDS: Final = dict(_NUMBERS.values())
_TYPES: Final = {dtype: number for number, (_, dtype) in _NUMBERS.items()}
#: Fields whose numbers are bytes; those of the others are varints.
_IN_BYTES: Final = {"floats", "doubles", "int8s", "uint8s"}
_UNPACKED: Final[dict[str, Any]] = {"floats": pb.UnpackedFloats, "doubles": pb.UnpackedDoubles}


class TensorError(ValueError):
    """A tensor or a spec that is not what it should be; the message names it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape, dtype and bounds of the tensors of one name.

    Attributes:
        uid: stands for the name in every step.
        name: for people and settings, with periods between levels.
        shape: of every tensor.
        dtype: of its elements.
        low: the lower bound, [] or [*shape]; None: no bound.
        high: the upper bound, likewise.
        size: elements of a tensor.
        field: of a Tensor message, which has them.
    """

    uid: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: NDArray[Any] | None
    high: NDArray[Any] | None
    size: int
    field: str

    @classmethod
    def make(
        cls,
        uid: int,
        name: str,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        low: NDArray[Any] | None = None,
        high: NDArray[Any] | None = None,
    ) -> Spec:
        """From a dtype that dm_env_rpc has."""
        field, dtype = _NUMBERS[_TYPES[dtype]]
        return cls(uid, name, tuple(shape), dtype, low, high, math.prod(shape), field)

    @classmethod
    def read(cls, uid: int, message: pb.TensorSpec) -> Spec:
        """
        Raises:
            TensorError: such tensors are not arrays of one shape, or the spec contradicts itself.
        """
        name, shape = message.name, tuple(message.shape)
        if message.dtype not in _NUMBERS:
            kind = _data_type_name(message.dtype)
            raise TensorError(f"{name!r} is of type {kind}, and only numbers can be learned from")
        if any(length < 0 for length in shape):
            raise TensorError(f"{name!r} has the shape {list(shape)}, which varies")
        if (size := math.prod(shape)) > MAX_ELEMENTS or len(shape) > 16:
            raise TensorError(f"{name!r} of shape {list(shape)} is over {MAX_ELEMENTS} elements")
        field, dtype = _NUMBERS[message.dtype]
        plain = cls(uid, name, shape, dtype, None, None, size, field)
        low, high = _bound(message.min, plain, "min"), _bound(message.max, plain, "max")
        if low is not None and high is not None and np.any(low > high):
            raise TensorError(f"{name!r} has a min above its max")
        return cls(uid, name, shape, dtype, low, high, size, field)


def decode(tensor: pb.Tensor, spec: Spec) -> NDArray[Any]:
    """A tensor's array [*spec.shape]; read-only if it is a view of the message's bytes.

    One element fills the whole shape, and one dimension may be left open, as in the protocol.

    Raises:
        TensorError: it does not fit its spec. Nothing is allocated then.
    """
    field = spec.field
    if tensor.WhichOneof("payload") != field:
        came = tensor.WhichOneof("payload") or "nothing"
        raise TensorError(f"{spec.name!r} came as {came}, and its spec says {field}")
    given = tuple(tensor.shape)
    if given != spec.shape and not _leads_to(given, spec.shape):
        raise TensorError(
            f"{spec.name!r} came with shape {list(given)}, and its spec says {list(spec.shape)}"
        )
    numbers = _get(getattr(tensor, field), field, spec)  # [size] or [1]
    if len(numbers) == spec.size:
        return numbers.reshape(spec.shape)
    return np.full(spec.shape, numbers[0], spec.dtype)


def encode(tensor: pb.Tensor, spec: Spec, value: Any) -> None:
    """Write an array into a new message.

    Raises:
        TensorError: it has another shape.
    """
    array = np.asarray(value, spec.dtype)  # [*spec.shape]
    if array.shape != spec.shape:
        raise TensorError(
            f"{spec.name!r} has the shape {list(array.shape)}, and its spec says {list(spec.shape)}"
        )
    tensor.shape.extend(spec.shape)
    _put(tensor, spec.field, array)


def setting(value: Any) -> pb.Tensor:
    """A setting of a configuration as a tensor.

    Args:
        value: a number, text, true or false, or an array of these. Integers are sent as int64 and
            others as double; {dtype = "int32", value = 3} says what else.

    Raises:
        TensorError: it is none of these.
    """
    dtype = None
    if isinstance(value, Mapping):
        if set(value) != {"dtype", "value"} or not isinstance(value["dtype"], str):
            raise TensorError(f"a table as a setting has dtype and value alone, not {value!r}")
        dtype, value = value["dtype"], value["value"]
    tensor = pb.Tensor()
    try:
        array = np.array(value, dtype)
        field = "strings" if array.dtype.kind == "U" else _NUMBERS[_TYPES[array.dtype]][0]
    except (TypeError, ValueError, KeyError, OverflowError):
        types = ", ".join(name.rstrip("s") for name in _FIELDS)
        raise TensorError(f"{value!r} (dtype {dtype}) is no tensor of {types} or text") from None
    tensor.shape.extend(array.shape)
    _put(tensor, field, array)
    return tensor


def _data_type_name(number: int) -> str:
    return pb.DataType.Name(number) if number in pb.DataType.values() else str(number)


def _leads_to(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a shape with one open dimension can be this one."""
    return (
        len(given) == len(shape)
        and sum(length < 0 for length in given) <= 1
        and all(a in (b, -1) for a, b in zip(given, shape, strict=True))
    )


def _bound(message: pb.TensorSpec.Value, spec: Spec, which: str) -> NDArray[Any] | None:
    field = message.WhichOneof("payload")
    if field is None:
        return None
    if field != spec.field:
        raise TensorError(f"{spec.name!r} is of {spec.field}, and its {which} of {field}")
    numbers = _get(getattr(message, field), field, spec)  # [size] or [1]
    if spec.dtype.kind == "f" and np.isnan(numbers).any():
        raise TensorError(f"{spec.name!r} has a {which} that is no number")
    return numbers.reshape(() if len(numbers) == 1 else spec.shape)


def _get(payload: Any, field: str, spec: Spec) -> NDArray[Any]:
    """The elements in a message: all, or one that stands for all."""
    content, itemsize = payload.array, 1
    if field in _IN_BYTES:
        itemsize = spec.dtype.itemsize
        if not content and field in _UNPACKED and (rest := payload.SerializeToString()):
            content, itemsize = _UNPACKED[field].FromString(rest).array, 1
    if len(content) not in (spec.size * itemsize, itemsize):
        raise TensorError(
            f"{spec.name!r} of shape {list(spec.shape)} has {len(content) / itemsize:g} elements: "
            f"there must be {spec.size}, or one that stands for all"
        )
    if isinstance(content, bytes):
        return np.frombuffer(content, spec.dtype)
    return np.fromiter(content, spec.dtype, len(content))


def _put(message: Any, field: str, array: Any) -> None:
    payload = getattr(message, field)
    payload.SetInParent()  # even where there is nothing in it
    if field in _IN_BYTES:
        payload.array = array.tobytes()
    else:
        payload.array.extend(array.ravel().tolist())
