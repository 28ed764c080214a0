"""Spaces as messages, and their values as arrays, without Gymnasium."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.flags import as_flags
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from juggler.runtime.wire.v1.spaces_pb2 import Space
from juggler.runtime.wire.v1.tensors_pb2 import DType

_DTYPES: dict[int, str] = {
    DType.DTYPE_BOOL: "?",
    DType.DTYPE_INT8: "i1",
    DType.DTYPE_INT16: "<i2",
    DType.DTYPE_INT32: "<i4",
    DType.DTYPE_INT64: "<i8",
    DType.DTYPE_UINT8: "u1",
    DType.DTYPE_UINT16: "<u2",
    DType.DTYPE_UINT32: "<u4",
    DType.DTYPE_UINT64: "<u8",
    DType.DTYPE_FLOAT16: "<f2",
    DType.DTYPE_FLOAT32: "<f4",
    DType.DTYPE_FLOAT64: "<f8",
}
_NUMBERS: dict[np.dtype[Any], Any] = {np.dtype(code): n for n, code in _DTYPES.items()}


def box(
    shape: Sequence[int], low: Any = -np.inf, high: Any = np.inf, dtype: Any = np.float32
) -> Space:
    """Arrays of a shape and dtype.

    Args:
        shape: shape of one observation or action.
        low: smallest values, one or as many as `shape` has; finite for integers.
        high: largest values, likewise.
        dtype: NumPy dtype.

    Raises:
        ValueError: no such arrays are possible.
    """
    if np.ndim(shape) != 1 or any(length < 0 for length in shape):
        raise ValueError(f"shape = {shape!r}: must be a list of lengths, as in [4] or [84, 84, 3]")
    number = _NUMBERS.get(np.dtype(dtype).newbyteorder("<"))
    if number is None:
        raise ValueError(f"dtype = {np.dtype(dtype)}: must be bool, an integer or a float")
    space = Space()
    space.box.shape.extend(shape)
    space.box.dtype = number
    whole = np.dtype(dtype).kind != "f"
    for name, bound in (("low", low), ("high", high)):
        if whole and not np.isfinite(bound).all():
            raise ValueError(f"{name} = {bound}: a box of {np.dtype(dtype)} needs finite bounds")
        values = np.ravel(bound).tolist()
        getattr(space.box, f"int_{name}" if whole else name).extend(values)
    return space


def discrete(n: int, start: int = 0) -> Space:
    """One of n integers."""
    space = Space()
    space.discrete.n, space.discrete.start, space.discrete.dtype = n, start, DType.DTYPE_INT64
    return space


def multi_discrete(nvec: Sequence[int]) -> Space:
    """Several integers, each from 0 to below its number in `nvec`."""
    space = Space()
    space.multi_discrete.nvec.extend(nvec)
    space.multi_discrete.start.extend([0] * len(nvec))
    space.multi_discrete.shape.append(len(nvec))
    space.multi_discrete.dtype = DType.DTYPE_INT64
    return space


def multi_binary(n: int) -> Space:
    """n numbers, each 0 or 1, int8."""
    space = Space()
    space.multi_binary.shape.append(n)
    return space


def dict_of(spaces: Mapping[str, Space]) -> Space:
    """Values by key. The key "action_mask", with `multi_binary(n)`, says which of n actions are
    legal."""
    space = Space()
    space.dict.SetInParent()
    for key in sorted(spaces):
        entry = space.dict.entries.add(key=key)
        entry.space.CopyFrom(spaces[key])
    return space


def tuple_of(spaces: Sequence[Space]) -> Space:
    """Values in order."""
    space = Space()
    space.tuple.SetInParent()
    for each in spaces:
        space.tuple.spaces.add().CopyFrom(each)
    return space


def as_message(space: Any) -> Space:
    """A space of this module, or a Gymnasium space, as a message.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(space, Space):
        return space
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None or not isinstance(space, gymnasium.Space):
        raise TypeError(
            f"{space!r} is not a space: make one with juggler.client.box, discrete, …, or give "
            "a Gymnasium space"
        )
    # A process with such a space has Gymnasium.
    from juggler.runtime.wire.spaces import space_to_message

    return space_to_message(space)


class Values:
    """Converts values of a space to arrays on the wire, and back.

    Args:
        space: space of one value.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.leaves = list(_leaves(space, ()))

    def tensors(self, values: Any) -> list[pb.NamedTensor]:
        """Values [R, ...] as tensors; they are dicts and tuples where the space is."""
        return [tensor_of(path, array) for path, array in self.arrays(values).items()]

    def arrays(self, values: Any) -> dict[tuple[str, ...], NDArray[Any]]:
        """Values [R, ...] as arrays by path, in the dtypes of the space.

        Raises:
            ValueError: they do not fit the space.
        """
        return {
            path: _fitted(path, dtype, np.asarray(_at(values, path)), shape)
            for path, dtype, shape in self.leaves
        }

    def blank(self) -> Any:
        """Zeros [1, ...]."""
        arrays = {path: np.zeros((1, *shape), dtype) for path, dtype, shape in self.leaves}
        return self.from_arrays(arrays)

    def from_tensors(self, tensors: Sequence[pb.NamedTensor]) -> Any:
        """Values [R, ...] of tensors, in newly allocated memory."""
        arrays = {
            tuple(tensor.path): np.frombuffer(
                bytearray(tensor.data), _DTYPES[tensor.dtype]
            ).reshape(tuple(tensor.shape))
            for tensor in tensors
        }
        return self.from_arrays(arrays)

    def from_arrays(self, arrays: Mapping[tuple[str, ...], Any]) -> Any:
        """Values [R, ...] of arrays by path."""
        return _value(self._space, arrays, ())


def for_each(name: str, given: Any, count: int, dtype: Any) -> NDArray[Any]:
    """One value for each of R environments -> [R].

    Args:
        name: name of the argument, for errors.
        given: [R], or one value for all.
        count: R.
        dtype: dtype of the result.

    Raises:
        ValueError: `given` has another shape, or is neither true nor false where the dtype is bool.
    """
    values = as_flags(name, given) if dtype is np.bool_ else np.asarray(given, dtype)
    if values.shape not in ((), (count,)):
        whose = "one number" if count == 1 else f"one for each of {count} environments"
        raise ValueError(f"{name} has shape {list(values.shape)}: give {whose}")
    return np.broadcast_to(values, count)


def names_of_infos(given: Sequence[str]) -> Sequence[str]:
    """As given.

    Raises:
        TypeError: it is one text, whose letters would be taken for the names.
    """
    if isinstance(given, str):
        raise TypeError(f"info_names must be a list of names, as in [{given!r}]")
    return given


def told(names: Sequence[str], infos: Mapping[str, Any], count: int) -> NDArray[np.float64]:
    """Numbers of R environments -> [R, K], NaN where there is none.

    Args:
        names: of the K numbers.
        infos: by name, [R] or one for all; other names are passed over.
        count: R.

    Raises:
        TypeError: something is no number.
        ValueError: something is no number, or there are not R of them.
    """
    each = [for_each(name, infos.get(name, np.nan), count, np.float64) for name in names]  # K * [R]
    return np.reshape(each, (len(names), count)).T


def one_of(values: Any) -> Any:
    """The first of values [1, ...]; an int for a Discrete space."""
    return _each(lambda array: array[0].item() if np.ndim(array) == 1 else array[0], values)


def as_first(value: Any) -> Any:
    """A value as values [1, ...]."""
    return _each(lambda leaf: np.asarray(leaf)[None], value)


def rows_of(values: Any, rows: Any) -> Any:
    """Some of values [R, ...]."""
    return _each(lambda array: np.asarray(array)[rows], values)


def _each(function: Callable[[Any], Any], values: Any) -> Any:
    """The same dicts and tuples, with the function applied to what is in them."""
    if isinstance(values, Mapping):
        return {key: _each(function, value) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_each(function, value) for value in values)
    return function(values)


def _leaves(space: Space, path: tuple[str, ...]) -> Any:
    """Path, dtype and shape of each array."""
    kind = space.WhichOneof("kind")
    if kind == "dict":
        for entry in space.dict.entries:
            yield from _leaves(entry.space, (*path, entry.key))
    elif kind == "tuple":
        for place, each in enumerate(space.tuple.spaces):
            yield from _leaves(each, (*path, str(place)))
    else:
        leaf: Any = getattr(space, kind) if kind else None
        number = DType.DTYPE_INT8 if kind == "multi_binary" else getattr(leaf, "dtype", 0)
        if number not in _DTYPES:
            raise TypeError(f"a space of the kind {kind} cannot be sent: use others, or pad it")
        yield path, np.dtype(_DTYPES[number]), tuple(getattr(leaf, "shape", ()))


def _at(values: Any, path: tuple[str, ...]) -> Any:
    found = values
    try:
        for key in path:
            found = found[int(key)] if isinstance(found, tuple) else found[key]
    except (LookupError, TypeError):
        raise ValueError(
            f"values have nothing at {'/'.join(path)}, which their space has"
        ) from None
    return found


def tensor_of(path: tuple[str, ...], array: NDArray[Any]) -> pb.NamedTensor:
    number = _NUMBERS[array.dtype.newbyteorder("<")]
    return pb.NamedTensor(path=path, dtype=number, shape=array.shape, data=array.tobytes())


def _fitted(
    path: tuple[str, ...], dtype: np.dtype[Any], array: NDArray[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    where = f" at {'/'.join(path)}" if path else ""
    if array.shape[1:] != shape:
        raise ValueError(
            f"values{where} have shape {list(array.shape[1:])}, and their space says {list(shape)}"
        )
    if array.dtype != dtype:
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ValueError(f"values{where} are {array.dtype}, where their space says {dtype}")
        array = array.astype(dtype)
    return array


def _value(space: Space, arrays: Mapping[tuple[str, ...], Any], path: tuple[str, ...]) -> Any:
    kind = space.WhichOneof("kind")
    if kind == "dict":
        return {e.key: _value(e.space, arrays, (*path, e.key)) for e in space.dict.entries}
    if kind == "tuple":
        return tuple(
            _value(each, arrays, (*path, str(place)))
            for place, each in enumerate(space.tuple.spaces)
        )
    return arrays[path]
