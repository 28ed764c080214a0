"""Gymnasium spaces as messages and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.structures import unsupported
from juggler.runtime.wire.trees import dtype_from_number, dtype_to_number
from juggler.runtime.wire.v1 import spaces_pb2 as pb
from juggler.runtime.wire.v1.tensors_pb2 import DType

#: The deepest nesting of spaces, including the outermost one.
MAX_DEPTH = 16

#: The most dimensions of a space.
MAX_RANK = 16

#: The most spaces within one, including itself.
MAX_SPACES = 4096

#: The most elements of a space and all spaces within it. Gymnasium keeps about ten bytes for each.
MAX_ELEMENTS = 1 << 25


def space_to_message(space: Space[Any]) -> pb.Space:
    """Convert a space to a message, without its random state.

    Raises:
        WireError: there is no message for this kind of space, or it exceeds a limit above.
    """
    try:
        message = _write(space)
    except (ValueError, TypeError) as error:
        raise _invalid("cannot be sent", error) from error
    check_limits(message)
    return message


def space_from_message(message: pb.Space) -> Space[Any]:
    """Convert a message to a space.

    Raises:
        WireError: the space is impossible, or exceeds a limit above.
    """
    check_limits(message)
    try:
        return _read(message)
    except (ValueError, TypeError, AssertionError, ArithmeticError, MemoryError) as error:
        raise _invalid("is not valid", error) from error


def _invalid(what: str, error: Exception) -> WireError:
    if isinstance(error, WireError):
        return error
    return WireError(f"the space {what}: {' '.join(str(error).split())[:200]}")


def check_limits(message: pb.Space) -> None:
    """Raise WireError if the space exceeds a limit above."""
    elements = 0
    for count, inner in enumerate(_walk(message, 1), start=1):
        elements += _elements(inner)
        if count > MAX_SPACES:
            raise WireError(f"a space of more than {MAX_SPACES} spaces is over the limit")
        if elements > MAX_ELEMENTS:
            raise WireError(f"a space of {elements} elements is over the limit, {MAX_ELEMENTS}")


def _walk(message: pb.Space, depth: int) -> Iterator[pb.Space]:
    """Yield the space and all spaces within it."""
    if depth > MAX_DEPTH:
        raise WireError(f"a space of spaces more than {MAX_DEPTH} deep is over the limit")
    yield message
    kind = message.WhichOneof("kind")
    inner: list[pb.Space] = []
    if kind == "dict":
        inner = [entry.space for entry in message.dict.entries]
    elif kind == "tuple":
        inner = list(message.tuple.spaces)
    elif kind == "graph":
        inner = [message.graph.node_space, message.graph.edge_space]
    elif kind == "sequence":
        inner = [message.sequence.feature_space]
    for space in inner:
        yield from _walk(space, depth + 1)


def _elements(message: pb.Space) -> int:
    kind = message.WhichOneof("kind")
    if kind == "text":
        return message.text.max_length
    if kind not in ("box", "multi_discrete", "multi_binary"):
        return 1
    shape = getattr(message, kind).shape
    if len(shape) > MAX_RANK:
        raise WireError(f"a space of {len(shape)} dimensions is over the limit, {MAX_RANK}")
    return math.prod(shape)


def _write(space: Space[Any]) -> pb.Space:
    # A space of a derived class arrives as its Gymnasium base class.
    match space:
        case spaces.Box():
            return pb.Space(box=_write_box(space))
        case spaces.Discrete():
            dtype = dtype_to_number(np.dtype(space.dtype))
            discrete = pb.DiscreteSpace(n=int(space.n), start=int(space.start), dtype=dtype)
            return pb.Space(discrete=discrete)
        case spaces.MultiDiscrete():
            # Without a start, the numbers count from zero.
            start = space.start.reshape(-1).tolist() if space.start.any() else ()
            nvec, dtype = space.nvec.reshape(-1).tolist(), dtype_to_number(space.dtype)
            multi = pb.MultiDiscreteSpace(shape=space.shape, dtype=dtype, nvec=nvec, start=start)
            return pb.Space(multi_discrete=multi)
        case spaces.MultiBinary():
            return pb.Space(multi_binary=pb.MultiBinarySpace(shape=space.shape))
        case spaces.Dict():
            return pb.Space(dict=_write_dict(space))
        case spaces.Tuple():
            return pb.Space(tuple=pb.TupleSpace(spaces=[_write(inner) for inner in space.spaces]))
        # The rest is only for tools: no values of these spaces can be sent.
        case spaces.Text():
            text = pb.TextSpace(min_length=space.min_length, max_length=space.max_length)
            text.characters = "".join(space.character_list)
            return pb.Space(text=text)
        case spaces.Graph():
            edge = None if space.edge_space is None else _write(space.edge_space)
            node = _write(space.node_space)
            return pb.Space(graph=pb.GraphSpace(node_space=node, edge_space=edge))
        case spaces.Sequence():
            feature = _write(space.feature_space)
            sequence = pb.SequenceSpace(feature_space=feature, stack=space.stack)
            return pb.Space(sequence=sequence)
    raise WireError(str(unsupported(space, ())))


def _read(message: pb.Space) -> Space[Any]:
    match message.WhichOneof("kind"):
        case "box":
            return _read_box(message.box)
        case "discrete":
            return _read_discrete(message.discrete)
        case "multi_discrete":
            return _read_multi_discrete(message.multi_discrete)
        case "multi_binary":
            # Gymnasium distinguishes MultiBinary(5) from MultiBinary([5]); the first form is more
            # common.
            shape = tuple(message.multi_binary.shape)
            return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
        case "dict":
            entries = [(entry.key, _read(entry.space)) for entry in message.dict.entries]
            if len(dict(entries)) != len(entries):
                raise WireError("a Dict space has a key twice")
            return spaces.Dict(entries)
        case "tuple":
            return spaces.Tuple([_read(inner) for inner in message.tuple.spaces])
        # As above: the rest is only for tools.
        case "text":
            text = message.text
            return spaces.Text(text.max_length, min_length=text.min_length, charset=text.characters)
        case "graph":
            graph = message.graph
            edge = _read(graph.edge_space) if graph.HasField("edge_space") else None
            return spaces.Graph(_read(graph.node_space), edge)
        case "sequence":
            feature = _read(message.sequence.feature_space)
            return spaces.Sequence(feature, stack=message.sequence.stack)
    what = "a space has no kind, or none that this version knows"
    raise WireError(f"{what}: set one, such as box or discrete")


def _write_box(space: spaces.Box) -> pb.BoxSpace:
    box = pb.BoxSpace(shape=space.shape, dtype=dtype_to_number(space.dtype))
    _write_bounds(box, "low", space.low, ~space.bounded_below)
    _write_bounds(box, "high", space.high, ~space.bounded_above)
    return box


def _write_bounds(
    box: pb.BoxSpace, side: str, bounds: NDArray[Any], infinite: NDArray[np.bool_]
) -> None:
    """Set low or high, or int_low or int_high if integers suffice."""
    values, infinities = bounds.reshape(-1), infinite.reshape(-1)
    if values.size and (values == values[0]).all() and (infinities == infinities[0]).all():
        values, infinities = values[:1], infinities[:1]
    numbers = values.tolist()
    if values.dtype.kind == "f":
        getattr(box, side).extend(numbers)
    elif not infinities.any() and max(numbers, default=0) < 1 << 63:
        getattr(box, f"int_{side}").extend(map(int, numbers))
    else:
        infinity = -math.inf if side == "low" else math.inf
        floats = [infinity if inf else float(n) for n, inf in zip(numbers, infinities, strict=True)]
        getattr(box, side).extend(floats)
        for number, inf in zip(numbers, infinities, strict=True):
            if not inf and _whole(float(number), values.dtype) != number:
                raise WireError(f"the bound {number} of a Box of {values.dtype} cannot be sent")


def _read_box(box: pb.BoxSpace) -> spaces.Box:
    dtype = _dtype(box.dtype, "biuf", "Box")
    low, bounded_below = _read_bounds(box, "low", dtype)
    high, bounded_above = _read_bounds(box, "high", dtype)
    if (low > high).any():
        raise WireError("a Box has a low bound above its high one")
    space = spaces.Box(low, high, tuple(box.shape), dtype.type)
    # An array of integers has no infinity, so Gymnasium keeps these flags.
    space.bounded_below, space.bounded_above = bounded_below.copy(), bounded_above.copy()
    return space


def _read_bounds(
    box: pb.BoxSpace, side: str, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the bounds on one side, and where they are finite."""
    floats, integers = getattr(box, side), getattr(box, f"int_{side}")
    numbers: list[float] = [*floats, *integers]
    shape = tuple(box.shape)
    if len(numbers) not in (1, math.prod(shape)) or (floats and integers):
        field = side if dtype.kind == "f" else f"int_{side}"
        raise WireError(
            f"a Box of shape {shape} has {len(numbers)} {side} bounds: for {dtype}, give "
            f"`{field}` one for each number, or one for all"
        )
    # An infinite bound of integers is sent as a double.
    wide = np.array(numbers, np.float64)
    if np.isnan(wide).any():
        raise WireError("a Box has a bound that is not a number")
    infinite = wide == (-math.inf if side == "low" else math.inf)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            bounds = wide.astype(dtype)
        if (np.isinf(bounds) != np.isinf(wide)).any():
            raise WireError(f"a Box of {dtype} has a {side} bound beyond that dtype")
    else:
        # Integers have no infinity, so the end of their range represents it.
        least, most = _range(dtype)
        end = least if side == "low" else most
        if infinite.any() and dtype.kind != "i":
            raise WireError(f"a Box of {dtype} cannot have infinite bounds")
        whole = [end if inf else _whole(n, dtype) for n, inf in zip(numbers, infinite, strict=True)]
        _check_range("Box", whole, dtype)
        bounds = np.array(whole, dtype)
    if len(numbers) != 1:
        return bounds.reshape(shape), ~infinite.reshape(shape)
    return np.broadcast_to(bounds[0], shape), np.broadcast_to(~infinite[0], shape)


def _read_discrete(discrete: pb.DiscreteSpace) -> spaces.Discrete[Any]:
    dtype = _dtype(discrete.dtype, "iu", "Discrete")
    n, start = discrete.n, discrete.start
    if n <= 0:
        raise WireError(f"a Discrete space of {n} elements must have at least one")
    _check_range("Discrete", [n, start, start + n - 1], dtype)
    if dtype == np.int64:  # the only dtype in Gymnasium 1.1
        return spaces.Discrete(n, start=start)
    return spaces.Discrete(n, start=start, dtype=dtype)


def _read_multi_discrete(multi: pb.MultiDiscreteSpace) -> spaces.MultiDiscrete[Any]:
    dtype = _dtype(multi.dtype, "iu", "MultiDiscrete")
    shape, nvec = tuple(multi.shape), list(multi.nvec)
    start = list(multi.start) or [0] * len(nvec)
    if not len(nvec) == len(start) == math.prod(shape):
        raise WireError(
            f"a MultiDiscrete space of shape {shape} has {len(nvec)} counts in nvec and "
            f"{len(start)} in start: give one for each number of its shape"
        )
    if min(nvec, default=1) <= 0:
        raise WireError("a MultiDiscrete space has a count that is not positive")
    ends = [first + n - 1 for first, n in zip(start, nvec, strict=True)]
    _check_range("MultiDiscrete", [*nvec, *start, *ends], dtype)
    counts, firsts = (np.array(numbers, dtype).reshape(shape) for numbers in (nvec, start))
    return spaces.MultiDiscrete(counts, dtype.type, start=firsts)


def _write_dict(space: spaces.Dict) -> pb.DictSpace:
    message = pb.DictSpace()
    for key, inner in space.spaces.items():
        if not isinstance(key, str):
            raise WireError(f"a Dict space can be sent if its keys are strings, not {key!r}")
        message.entries.add(key=key, space=_write(inner))
    return message


def _dtype(number: DType, kinds: str, space: str) -> np.dtype[Any]:
    dtype = dtype_from_number(number)
    if dtype.kind not in kinds:
        raise WireError(f"a {space} space cannot have the dtype {dtype}")
    return dtype


def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the smallest and largest number of an integer dtype or bool."""
    if dtype.kind == "b":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _check_range(space: str, numbers: Sequence[int], dtype: np.dtype[Any]) -> None:
    least, most = _range(dtype)
    if numbers and not (least <= min(numbers) and max(numbers) <= most):
        raise WireError(f"a {space} space has numbers beyond its dtype {dtype}")


def _whole(number: float, dtype: np.dtype[Any]) -> int:
    """Return the integer for a bound that was sent as a double.

    2^64 - 1 is not a double; the next one, 2^64, represents it.
    """
    if not math.isfinite(number) or number != int(number):
        raise WireError(f"a Box of {dtype} has the bound {number}")
    return min(int(number), _range(dtype)[1]) if number == 2.0**64 else int(number)
