"""Spaces as messages, and their values as arrays, without Gymnasium."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.flags import as_flags
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from juggler.runtime.wire.v1.spaces_pb2 import (
    BoxSpace,
    DictSpace,
    DiscreteSpace,
    MultiBinarySpace,
    MultiDiscreteSpace,
    Space,
    TupleSpace,
)
from juggler.runtime.wire.v1.tensors_pb2 import DType

Path = tuple[str, ...]
Arrays = dict[Path, NDArray[Any]]  # [R, ...] by path

_DTYPES: dict[int, np.dtype[Any]] = {
    number: np.dtype(name.removeprefix("DTYPE_").lower()).newbyteorder("<")
    for name, number in DType.items()
    if name not in ("DTYPE_UNSPECIFIED", "DTYPE_BFLOAT16")
}
_NUMBERS: dict[np.dtype[Any], Any] = {dtype: number for number, dtype in _DTYPES.items()}


def box(
    shape: Sequence[int], low: Any = -np.inf, high: Any = np.inf, dtype: Any = np.float32
) -> Space:
    """Make a space of arrays of a shape and dtype.

    Args:
        shape: shape of one observation or action.
        low: minimum, one number or an array of `shape`; finite for integers.
        high: maximum, in the same form.
        dtype: NumPy dtype.

    Raises:
        ValueError: the shape, dtype or bounds are not valid.
    """
    if np.ndim(shape) != 1 or any(length < 0 for length in shape):
        raise ValueError(f"shape = {shape!r}: must be a list of lengths, as in [4] or [84, 84, 3]")
    number = _NUMBERS.get(np.dtype(dtype).newbyteorder("<"))
    if number is None:
        raise ValueError(f"dtype = {np.dtype(dtype)}: must be bool, an integer or a float")
    message = BoxSpace(shape=shape, dtype=number)
    whole = np.dtype(dtype).kind != "f"
    for name, bound in (("low", low), ("high", high)):
        if whole and not np.isfinite(bound).all():
            raise ValueError(f"{name} = {bound}: a box of {np.dtype(dtype)} needs finite bounds")
        getattr(message, f"int_{name}" if whole else name).extend(np.ravel(bound).tolist())
    return Space(box=message)


def discrete(n: int, start: int = 0) -> Space:
    """Make a space of n integers."""
    return Space(discrete=DiscreteSpace(n=n, start=start, dtype=DType.DTYPE_INT64))


def multi_discrete(nvec: Sequence[int]) -> Space:
    """Make a space of integers, each from 0 to below its `nvec`."""
    start, shape, dtype = [0] * len(nvec), [len(nvec)], DType.DTYPE_INT64
    message = MultiDiscreteSpace(nvec=nvec, start=start, shape=shape, dtype=dtype)
    return Space(multi_discrete=message)


def multi_binary(n: int) -> Space:
    """Make a space of n numbers, each 0 or 1, int8."""
    return Space(multi_binary=MultiBinarySpace(shape=[n]))


def dict_of(spaces: Mapping[str, Space]) -> Space:
    """Make a space of values by key.

    The key "action_mask", with `multi_binary(n)`, marks the legal actions among n.
    """
    entries = [DictSpace.Entry(key=key, space=spaces[key]) for key in sorted(spaces)]
    return Space(dict=DictSpace(entries=entries))


def tuple_of(spaces: Sequence[Space]) -> Space:
    """Make a space of values in order."""
    return Space(tuple=TupleSpace(spaces=spaces))


def as_message(space: Any) -> Space:
    """Return a space of this module or of Gymnasium as a message.

    Raises:
        TypeError: it is not a space.
    """
    if isinstance(space, Space):
        return space
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None or not isinstance(space, gymnasium.Space):
        raise TypeError(
            f"{space!r} is not a space: make one with juggler.client.box, discrete, …, or give "
            "a Gymnasium space"
        )
    # A process with a Gymnasium space has Gymnasium.
    from juggler.runtime.wire.spaces import space_to_message

    return space_to_message(space)


class Values:
    """Converts values of a space to arrays on the wire, and back.

    Raises:
        TypeError: the space has parts that cannot be sent.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._leaves = list(_leaves(space, ()))

    def arrays(
        self,
        values: Any,
        count: int | None = None,
        *,
        one: bool = False,
        rows: NDArray[np.intp] | None = None,
    ) -> Arrays:
        """Return values as arrays by path, in the space's dtypes.

        Args:
            values: arrays [R, ...], in dicts and tuples as in the space.
            count: R; None: any number.
            one: they have no dimension R, and get one.
            rows: [K] rows to return, as copies; then `values` may be an array of R objects.

        Raises:
            ValueError: they do not fit the space.
        """
        if rows is not None and isinstance(values, np.ndarray) and values.dtype.kind == "O":
            if count is not None and len(values) != count:
                raise ValueError(f"values have {len(values)} rows: give {count} rows")
            parts = [self.arrays(values[row], one=True) for row in rows]
            return {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}
        # Without `rows`, arrays may be views of the caller's memory.
        found: Arrays = {}
        for path, dtype, shape in self._leaves:
            array = np.asarray(_at(values, path))
            array = array[None] if one else array
            where = f" at {'/'.join(path)}" if path else ""
            if array.shape[1:] != shape:
                has, says = list(array.shape[1:]), list(shape)
                raise ValueError(f"values{where} have shape {has}, and their space says {says}")
            if count is not None and array.shape[:1] != (count,):
                all_of = list(array.shape)
                raise ValueError(f"values{where} have shape {all_of}: give {count} rows")
            # Widths may change, but not kinds: 0.5 is no integer.
            if array.dtype != dtype:
                if not np.can_cast(array.dtype, dtype, "same_kind"):
                    kind = array.dtype
                    raise ValueError(f"values{where} are {kind}, but their space says {dtype}")
                array = array.astype(dtype)
            found[path] = array if rows is None else array[rows]
        return found

    def tensors(self, values: Any) -> list[pb.NamedTensor]:
        """Return values [R, ...] as messages."""
        return as_tensors(self.arrays(values))

    def zeros(self) -> Arrays:
        """Return zeros [1, ...] by path."""
        return {path: np.zeros((1, *shape), dtype) for path, dtype, shape in self._leaves}

    def from_tensors(self, tensors: Sequence[pb.NamedTensor], *, one: bool = False) -> Any:
        """Return the values [R, ...] of messages, in newly allocated memory.

        With `one`, return the first value, for a Discrete space as an int.
        """
        arrays: Arrays = {}
        for tensor in tensors:
            flat = np.frombuffer(bytearray(tensor.data), _DTYPES[tensor.dtype])
            arrays[tuple(tensor.path)] = flat.reshape(tuple(tensor.shape))
        return self.from_arrays(arrays, one=one)

    def from_arrays(self, arrays: Arrays, *, one: bool = False) -> Any:
        """Return the values [R, ...] of arrays by path, as `from_tensors` does."""
        if one:
            first = {path: each[0] for path, each in arrays.items()}
            arrays = {path: each if each.ndim else each.item() for path, each in first.items()}
        return _value(self._space, arrays, ())


def as_tensors(arrays: Arrays) -> list[pb.NamedTensor]:
    """Return arrays as messages."""
    return [
        pb.NamedTensor(
            path=path, dtype=_NUMBERS[a.dtype.newbyteorder("<")], shape=a.shape, data=a.tobytes()
        )
        for path, a in arrays.items()
    ]


def for_each(name: str, given: Any, count: int, dtype: Any) -> NDArray[Any]:
    """Return one value for each of R = `count` environments [R].

    Raises:
        ValueError: `given` is neither [R] nor one value, or not true or false for the dtype bool.
    """
    values = as_flags(name, given) if dtype is np.bool_ else np.asarray(given, dtype)
    if values.shape == (count,):
        return values
    if values.shape:
        whose = "one number" if count == 1 else f"one for each of {count} environments"
        raise ValueError(f"{name} has shape {list(values.shape)}: give {whose}")
    return np.full(count, values)


def numbers_of(names: Sequence[str], infos: Mapping[str, Any], count: int) -> list[float]:
    """Return the named numbers of `infos` as `Rows.infos` of simulator.proto.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is not a number, or its length is not `count`.
    """
    each = [for_each(name, infos.get(name, np.nan), count, np.float64) for name in names]
    return np.transpose(each).ravel().tolist() if each else []


def _leaves(space: Space, path: Path) -> Iterator[tuple[Path, np.dtype[Any], tuple[int, ...]]]:
    """Yield path, dtype and shape of each array."""
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
        yield path, _DTYPES[number], tuple(getattr(leaf, "shape", ()))


def _at(values: Any, path: Path) -> Any:
    found = values
    try:
        for key in path:
            found = found[int(key)] if isinstance(found, tuple) else found[key]
    except (LookupError, TypeError):
        name = "/".join(path)
        raise ValueError(f"values have nothing at {name}, which their space has") from None
    return found


def _value(space: Space, arrays: Arrays, path: Path) -> Any:
    kind = space.WhichOneof("kind")
    if kind == "dict":
        return {e.key: _value(e.space, arrays, (*path, e.key)) for e in space.dict.entries}
    if kind == "tuple":
        parts = enumerate(space.tuple.spaces)
        return tuple(_value(each, arrays, (*path, str(place))) for place, each in parts)
    return arrays[path]
