"""Tensors of dm_env_rpc and their specs, as NumPy arrays and Gymnasium spaces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from juggler.envrunner.dm_env_rpc.options import SimulatorOptions
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.trees import Path, unflatten

Space = gymnasium.Space[Any]

#: Maximum bytes of one message: observations may be images.
MAX_MESSAGE_BYTES: Final = 256 << 20
#: Maximum elements of one tensor.
MAX_ELEMENTS: Final = 1 << 25
#: An integer with more values is a number instead of a choice.
_MOST_CHOICES: Final = 1 << 16

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
#: Fields whose numbers are bytes; the other fields have varints.
_IN_BYTES: Final = {"floats", "doubles", "int8s", "uint8s"}
_UNPACKED: Final[dict[str, Any]] = {"floats": pb.UnpackedFloats, "doubles": pb.UnpackedDoubles}


class SimulatorError(Exception):
    """A simulator failed or refused a request; the message has the reason.

    Attributes:
        unavailable: it cannot be reached, or has disconnected; dialling again may help.
        refused: it answered with an error.
    """

    def __init__(self, message: str, *, unavailable: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.unavailable, self.refused = unavailable, refused


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape, dtype and bounds of the tensors of one name."""

    uid: int  # number of the tensor in every step
    name: str  # in messages and settings, with periods between levels
    shape: tuple[int, ...]
    field: str  # of a Tensor message, which has its elements
    dtype: np.dtype[Any]
    low: NDArray[Any] | None = None  # the lower bound, [] or [*shape]; None: no bound
    high: NDArray[Any] | None = None  # the upper bound, in the same form

    @classmethod
    def read(cls, uid: int, message: pb.TensorSpec) -> Spec:
        """Read a tensor's spec.

        Raises:
            SimulatorError: the tensors have no common shape, or the spec contradicts itself.
        """
        name, shape, kind = message.name, tuple(message.shape), message.dtype
        if kind not in _NUMBERS:
            known = pb.DataType.Name(kind) if kind in pb.DataType.values() else str(kind)
            raise SimulatorError(
                f"{name!r} is of type {known}, and only numbers can be learned from"
            )
        if any(length < 0 for length in shape):
            raise SimulatorError(f"{name!r} has the shape {list(shape)}, which varies")
        if math.prod(shape) > MAX_ELEMENTS or len(shape) > 16:
            raise SimulatorError(f"{name!r} of shape {list(shape)} is over {MAX_ELEMENTS} elements")
        plain = cls(uid, name, shape, *_NUMBERS[kind])
        low, high = plain._bound(message.min, "min"), plain._bound(message.max, "max")
        if low is not None and high is not None and np.any(low > high):
            raise SimulatorError(f"{name!r} has a min above its max")
        return cls(uid, name, shape, plain.field, plain.dtype, low, high)

    def __str__(self) -> str:
        low, high = (None if end is None else end.tolist() for end in (self.low, self.high))
        return f"{self.name!r} ({self.dtype} {list(self.shape)}, min {low}, max {high})"

    @property
    def size(self) -> int:
        """Elements of a tensor."""
        return math.prod(self.shape)

    def range(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return min and max, [] or [*shape]; without bounds, the dtype's limits."""
        least: Any = -np.inf
        most: Any = np.inf
        if self.dtype.kind == "b":
            least, most = False, True
        elif self.dtype.kind != "f":
            info = np.iinfo(self.dtype)
            least, most = info.min, info.max
        low = np.asarray(least if self.low is None else self.low, self.dtype)
        high = np.asarray(most if self.high is None else self.high, self.dtype)
        return low, high

    def space(self, what: str) -> Space:
        """Return the space of a tensor's values.

        Raises:
            SimulatorError: it is an action without a number of choices.
        """
        shape, kind = self.shape, self.dtype.kind
        if kind == "b":
            return spaces.MultiBinary(shape) if shape else spaces.Discrete(2)
        low, high = self.range()
        choices: NDArray[Any] | None = None  # [] or [*shape]
        if kind != "f" and self.low is not None and self.high is not None:
            # Python's integers, because the number of values may overflow the dtype.
            choices = np.asarray(np.subtract(high, low, dtype=object) + 1)
            if np.any(choices > _MOST_CHOICES):
                choices = None
        if choices is not None and not shape:
            return spaces.Discrete(int(choices.item()), start=int(low.item()))
        if what == "action" and choices is not None:
            counts = np.broadcast_to(choices.astype(np.int64), shape)  # [*shape]
            return spaces.MultiDiscrete(counts, start=np.broadcast_to(low.astype(np.int64), shape))
        if what == "action" and kind != "f":
            raise SimulatorError(
                f"the action {self.name!r} is an integer without bounds, or of more than "
                f"{_MOST_CHOICES} values: leave it out by naming the others in env_kwargs.actions"
            )
        bounds = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
        return spaces.Box(*bounds, shape, self.dtype.type)

    def decode(self, tensor: pb.Tensor) -> NDArray[Any]:
        """Return a tensor's array [*shape]; views of the message are read-only.

        One element fills the whole shape, and one dimension may be left open, as in the protocol.

        Raises:
            SimulatorError: it does not fit. Nothing is allocated then.
        """
        if (came := tensor.WhichOneof("payload")) != self.field:
            raise SimulatorError(
                f"{self.name!r} arrived as {came or 'nothing'}, and its spec says {self.field}"
            )
        # One dimension may be left open, as -1.
        given = tuple(tensor.shape)
        if given != self.shape and (
            len(given) != len(self.shape)
            or given.count(-1) > 1
            or not all(a in (b, -1) for a, b in zip(given, self.shape, strict=True))
        ):
            raise SimulatorError(
                f"{self.name!r} arrived with shape {list(given)}, and its spec says "
                f"{list(self.shape)}"
            )
        numbers = self._numbers(getattr(tensor, self.field))  # [size] or [1]
        if len(numbers) == self.size:
            return numbers.reshape(self.shape)
        return np.full(self.shape, numbers[0], self.dtype)

    def encode(self, tensor: pb.Tensor, array: NDArray[Any]) -> None:
        """Write an array [*shape] of the dtype into a new message."""
        _write(tensor, self.field, array)

    def _bound(self, message: pb.TensorSpec.Value, which: str) -> NDArray[Any] | None:
        field = message.WhichOneof("payload")
        if field is None:
            return None
        if field != self.field:
            raise SimulatorError(f"{self.name!r} is of {self.field}, and its {which} of {field}")
        numbers = self._numbers(getattr(message, field))  # [size] or [1]
        if self.dtype.kind == "f" and np.isnan(numbers).any():
            raise SimulatorError(f"{self.name!r} has a {which} that is no number")
        return numbers.reshape(() if len(numbers) == 1 else self.shape)

    def _numbers(self, payload: Any) -> NDArray[Any]:
        """Return the elements in a message: all, or one for all."""
        content, itemsize = payload.array, 1
        if self.field in _IN_BYTES:
            itemsize = self.dtype.itemsize
            unpacked = _UNPACKED.get(self.field)
            if not content and unpacked and (rest := payload.SerializeToString()):
                content, itemsize = unpacked.FromString(rest).array, 1
        if len(content) not in (self.size * itemsize, itemsize):
            raise SimulatorError(
                f"{self.name!r} of shape {list(self.shape)} has {len(content) / itemsize:g} "
                f"elements: there must be {self.size}, or one that stands for all"
            )
        if isinstance(content, bytes):
            return np.frombuffer(content, self.dtype)
        return np.fromiter(content, self.dtype, len(content))


def setting(value: Any) -> pb.Tensor:
    """Convert a setting of a configuration to a tensor.

    Args:
        value: a number, text, true or false, or an array of these. Integers are sent as int64 and
            other numbers as double; {dtype = "int32", value = 3} sets another dtype.

    Raises:
        SimulatorError: it is something else.
    """
    dtype = None
    if isinstance(value, Mapping):
        if set(value) != {"dtype", "value"} or not isinstance(value["dtype"], str):
            raise SimulatorError(f"a table as a setting has dtype and value alone, not {value!r}")
        dtype, value = value["dtype"], value["value"]
    tensor, field_of = pb.Tensor(), {dtype: field for field, dtype in _NUMBERS.values()}
    try:
        array = np.array(value, dtype)
        field = "strings" if array.dtype.kind == "U" else field_of[array.dtype]
    except (TypeError, ValueError, KeyError, OverflowError):
        types = ", ".join(name.rstrip("s") for name in field_of.values())
        raise SimulatorError(f"{value!r} (dtype {dtype}) is no tensor of {types} or text") from None
    _write(tensor, field, array)
    return tensor


def _write(tensor: pb.Tensor, field: str, array: NDArray[Any]) -> None:
    tensor.shape.extend(array.shape)
    payload = getattr(tensor, field)
    payload.SetInParent()  # even if it is empty
    if field in _IN_BYTES:
        payload.array = array.tobytes()
    else:
        payload.array.extend(array.ravel().tolist())


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Tensors, and their paths in the trees of a space."""

    what: str
    # A Dict by names, with a level for each period in them; for one tensor, its own space.
    space: Space
    specs: tuple[Spec, ...]
    paths: tuple[Path, ...]  # of the tensors in trees of the space, in the same order

    @classmethod
    def of_specs(cls, specs: Sequence[Spec], what: str) -> TensorLayout:
        """Lay specs out as one space, by the periods in their names.

        Raises:
            SimulatorError: no space has these names, or an action these values.
        """
        leaves = [spec.space(what) for spec in specs]
        if len(specs) == 1:
            return cls(what, leaves[0], tuple(specs), ((),))
        # The periods in names are the protocol's levels of a Dict.
        paths = tuple(tuple(spec.name.split(".")) for spec in specs)
        try:
            if not all(map(all, paths)):
                raise WireError("a part of a name is empty")
            tree = unflatten(zip(paths, leaves, strict=True))
        except WireError as error:
            raise SimulatorError(
                f"the {what}s do not fit into one Dict: {error}. Names are made of parts with "
                "periods between them, and none is another's first parts"
            ) from None
        return cls(what, _as_dict(tree), tuple(specs), paths)

    def adopt(self, offered: Mapping[int, pb.TensorSpec]) -> TensorLayout:
        """Adopt new specs with the same space and order.

        Raises:
            SimulatorError: they no longer fit; names what has changed.
        """
        by_name = {message.name: (uid, message) for uid, message in offered.items()}
        specs = []
        for before in self.specs:
            if before.name not in by_name:
                raise SimulatorError(f"the {self.what} {before.name!r} is gone")
            now = Spec.read(*by_name[before.name])
            fits = (now.shape, now.dtype) == (before.shape, before.dtype)
            if fits:  # the range of an observation may shrink, and the range of an action may grow
                inner, outer = (before, now) if self.what == "action" else (now, before)
                (low, high), (least, most) = inner.range(), outer.range()
                fits = bool(np.all(least <= low) and np.all(high <= most))
            if not fits:
                raise SimulatorError(f"the {self.what} {before} is now {now}")
            specs.append(now)
        return TensorLayout(self.what, self.space, tuple(specs), self.paths)


def _as_dict(space: Any) -> Any:
    if isinstance(space, dict):
        return spaces.Dict({key: _as_dict(child) for key, child in space.items()})
    return space


def chosen(
    offered: Mapping[int, pb.TensorSpec],
    names: Sequence[str] | None,
    without: Iterable[str],
    what: str,
) -> list[Spec]:
    """Return the specs to use, in order of ids or of `names`.

    Args:
        names: of the specs to use; None: all but `without`.
        without: names to leave out.

    Raises:
        SimulatorError: a spec is missing or cannot be used, or two have the same name.
    """
    by_name = {message.name: uid for uid, message in sorted(offered.items())}
    known = ", ".join(sorted(message.name for message in offered.values()))
    if len(by_name) != len(offered):
        raise SimulatorError(f"two of its {what}s have the same name: {known}")
    wanted = [name for name in by_name if name not in without] if names is None else names
    if missing := [name for name in wanted if name not in by_name]:
        raise SimulatorError(f"it has no {what} {missing[0]!r}; it has {known}")
    if not wanted:
        raise SimulatorError(f"it offers no {what}s; it has {known or 'none at all'}")
    try:
        return [Spec.read(by_name[name], offered[by_name[name]]) for name in wanted]
    except SimulatorError as error:
        raise SimulatorError(
            f"the {what} {error}: leave it out by naming the others in env_kwargs.{what}s"
        ) from None


@dataclass(frozen=True, slots=True)
class WorldInterface:
    """Specs by their use."""

    observations: TensorLayout
    actions: TensorLayout
    signals: TensorLayout  # the reward and, if there is one, the discount

    @classmethod
    def of(cls, specs: pb.ActionObservationSpecs, options: SimulatorOptions) -> WorldInterface:
        """Read the specs of a simulator.

        Raises:
            SimulatorError: nothing can be learned from it; names the tensor and a remedy.
        """
        signals = [options.reward]
        if any(spec.name == options.discount for spec in specs.observations.values()):
            signals.append(options.discount)
        try:
            signal_specs = chosen(specs.observations, signals, (), "observation")
        except SimulatorError as error:
            raise SimulatorError(f"{error}; env_kwargs.reward names the reward") from None
        for spec in signal_specs:
            if spec.size != 1:
                raise SimulatorError(f"{spec.name!r} must be one number, not {list(spec.shape)}")
        # One reply has all of them, within gRPC's size limit.
        seen = chosen(specs.observations, options.observations, signals, "observation")
        if (size := sum(spec.size * spec.dtype.itemsize for spec in seen)) > MAX_MESSAGE_BYTES:
            raise SimulatorError(f"its observations have {size} bytes, over {MAX_MESSAGE_BYTES}")
        return cls(
            TensorLayout.of_specs(seen, "observation"),
            TensorLayout.of_specs(chosen(specs.actions, options.actions, (), "action"), "action"),
            TensorLayout.of_specs(signal_specs, "observation"),
        )

    def adopt(self, specs: pb.ActionObservationSpecs) -> WorldInterface:
        """Adopt new specs with the same spaces.

        Raises:
            SimulatorError: they no longer fit; names what has changed.
        """
        return WorldInterface(
            self.observations.adopt(specs.observations),
            self.actions.adopt(specs.actions),
            self.signals.adopt(specs.observations),
        )

    def write_request(
        self, actions: Mapping[Path, Any] | None, row: int, step: pb.StepRequest
    ) -> None:
        """Fill a request with one environment's actions and wanted observations.

        Floats are clipped to the bounds, which simulators check: a policy's actions may exceed them
        by rounding, or by far if no connector clips them.

        Args:
            actions: of all environments [N, ...], by their paths; None: no actions.
        """
        for layout in (self.observations, self.signals):
            step.requested_observations.extend(spec.uid for spec in layout.specs)
        if actions is None:
            return
        for path, spec in zip(self.actions.paths, self.actions.specs, strict=True):
            action = np.asarray(actions[path][row], spec.dtype)  # [*spec.shape]
            if spec.dtype.kind == "f" and (spec.low is not None or spec.high is not None):
                action = np.clip(action, spec.low, spec.high)
            spec.encode(step.actions[spec.uid], action)

    def read_reply(self, step: pb.StepResponse, row: int, into: Mapping[Path, Any]) -> list[float]:
        """Copy a reply's observations into row `row` of arrays [N, ...].

        Returns the reward and, if the simulator has one, the discount.

        Raises:
            SimulatorError: an observation is missing, or does not fit its spec.
        """
        for path, spec in zip(self.observations.paths, self.observations.specs, strict=True):
            into[path][row] = _given(step, spec)
        return [float(_given(step, spec).item()) for spec in self.signals.specs]


def _given(step: pb.StepResponse, spec: Spec) -> NDArray[Any]:
    if spec.uid not in step.observations:
        raise SimulatorError(f"{spec.name!r} was requested, and is not in the reply")
    return spec.decode(step.observations[spec.uid])
