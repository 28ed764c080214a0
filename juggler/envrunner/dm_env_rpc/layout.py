"""The specs of a simulator's tensors, and the Gymnasium spaces made from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from juggler.envrunner.dm_env_rpc.options import SimulatorOptions
from juggler.envrunner.dm_env_rpc.tensors import (
    MAX_MESSAGE_BYTES,
    Spec,
    TensorError,
    decode,
    encode,
)
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from juggler.runtime.wire.trees import Path

Space = gymnasium.Space[Any]

#: An integer of more values than this is a number, and not a choice.
_MOST_CHOICES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors, and where they are in the trees of a space.

    Attributes:
        space: a Dict by names, with a level for each period in them; one tensor alone is its space.
        specs: of the tensors.
        paths: in trees of the space, of each.
    """

    space: Space
    specs: tuple[Spec, ...]
    paths: tuple[Path, ...]

    @classmethod
    def of_specs(cls, specs: Sequence[Spec], what: str) -> Layout:
        """
        Args:
            specs: at least one.
            what: "action" or "observation".

        Raises:
            TensorError: no space has such names, or an action such values.
        """
        each = [_space(spec, what) for spec in specs]
        if len(specs) == 1:
            return cls(each[0], tuple(specs), ((),))
        paths = tuple(tuple(spec.name.split(".")) for spec in specs)
        space: dict[str, Any] = {}
        for spec, path, leaf in zip(specs, paths, each, strict=True):
            at = space
            for key in path[:-1]:
                at = at.setdefault(key, {})
                if not isinstance(at, dict):
                    break
            if not all(path) or not isinstance(at, dict) or path[-1] in at:
                raise TensorError(
                    f"the {what} {spec.name!r} cannot be placed beside the others: names are made "
                    "of parts with periods between them, and none is another's first parts"
                )
            at[path[-1]] = leaf
        return cls(cast("Space", _as_dict(space)), tuple(specs), paths)

    def adopt(self, offered: Mapping[int, pb.TensorSpec], what: str) -> Layout:
        """The same space and order, from specs that were sent anew.

        Raises:
            TensorError: they no longer fit; names what has changed.
        """
        by_name = {message.name: (uid, message) for uid, message in offered.items()}
        specs = []
        for before in self.specs:
            if before.name not in by_name:
                raise TensorError(f"the {what} {before.name!r} is gone")
            now = Spec.read(*by_name[before.name])
            inner, outer = (before, now) if what == "action" else (now, before)
            if (now.shape, now.dtype) != (before.shape, before.dtype) or not _within(inner, outer):
                raise TensorError(f"the {what} {_said(before)} is now {_said(now)}")
            specs.append(now)
        return Layout(self.space, tuple(specs), self.paths)


def chosen(
    offered: Mapping[int, pb.TensorSpec],
    names: Sequence[str] | None,
    without: Iterable[str],
    what: str,
) -> list[Spec]:
    """The specs to use, in order of their ids or of `names`.

    Args:
        offered: by unique id.
        names: of those to use; None: all.
        without: names to leave out then.
        what: "action" or "observation".

    Raises:
        TensorError: one cannot be used, is not there, or two have the same name.
    """
    by_name = {message.name: uid for uid, message in sorted(offered.items())}
    if len(by_name) != len(offered):
        raise TensorError(f"two of its {what}s have the same name: {_names(offered)}")
    wanted = [name for name in by_name if name not in without] if names is None else names
    if missing := [name for name in wanted if name not in by_name]:
        raise TensorError(f"it has no {what} {missing[0]!r}; it has {_names(offered)}")
    if not wanted:
        raise TensorError(f"it offers no {what}s; it has {_names(offered) or 'none at all'}")
    try:
        return [Spec.read(by_name[name], offered[by_name[name]]) for name in wanted]
    except TensorError as error:
        raise TensorError(
            f"the {what} {error}: leave it out by naming the others in env_kwargs.{what}s"
        ) from None


def _names(offered: Mapping[int, pb.TensorSpec]) -> str:
    return ", ".join(sorted(message.name for message in offered.values()))


def _as_dict(space: Any) -> Any:
    if isinstance(space, dict):
        return spaces.Dict({key: _as_dict(child) for key, child in space.items()})
    return space


def _space(spec: Spec, what: str) -> Space:
    """The space of a tensor's values."""
    low, high, kind, shape = spec.low, spec.high, spec.dtype.kind, spec.shape
    if kind == "b":
        return spaces.MultiBinary(shape) if shape else spaces.Discrete(2)
    if kind == "f":
        return _box(spec, -np.inf, np.inf)
    choices: NDArray[Any] | None = None  # [] or [*shape]
    if low is not None and high is not None:
        # Python's integers: a range may have more values than the largest number says.
        choices = np.asarray(np.subtract(high, low, dtype=object) + 1)
        if np.any(choices > _MOST_CHOICES):
            choices = None
    if choices is not None and not shape:
        return spaces.Discrete(int(choices.item()), start=int(np.asarray(low).item()))
    if what == "action":
        if choices is None:
            raise TensorError(
                f"the action {spec.name!r} is an integer without bounds, or of more than "
                f"{_MOST_CHOICES} values: leave it out by naming the others in env_kwargs.actions"
            )
        counts = np.broadcast_to(choices.astype(np.int64), shape)  # [*shape]
        start = np.broadcast_to(np.asarray(low, np.int64), shape)  # [*shape]
        return spaces.MultiDiscrete(counts, start=start)
    info = np.iinfo(spec.dtype)
    return _box(spec, info.min, info.max)


def _box(spec: Spec, least: float, most: float) -> Space:
    low = np.asarray(least if spec.low is None else spec.low, spec.dtype)  # [] or [*shape]
    high = np.asarray(most if spec.high is None else spec.high, spec.dtype)  # [] or [*shape]
    shape = spec.shape
    return spaces.Box(
        np.broadcast_to(low, shape), np.broadcast_to(high, shape), shape, spec.dtype.type
    )


def _within(inner: Spec, outer: Spec) -> bool:
    """Whether the outer spec allows all values of the inner one, which has the same dtype."""
    return _least(inner, outer.low, np.less_equal, inner.low) and _least(
        inner, outer.high, np.greater_equal, inner.high
    )


def _least(spec: Spec, outer: Any, order: Any, inner: Any) -> bool:
    if outer is None:
        return True
    if inner is None:
        if spec.dtype.kind == "f":
            return bool(np.isinf(outer).all())
        info = np.iinfo(spec.dtype)
        inner = info.min if order is np.less_equal else info.max
    return bool(np.all(order(outer, inner)))


def _said(spec: Spec) -> str:
    low, high = (None if end is None else end.tolist() for end in (spec.low, spec.high))
    return f"{spec.name!r} ({spec.dtype} {list(spec.shape)}, min {low}, max {high})"


@dataclass(frozen=True, slots=True)
class Interface:
    """Specs by their use.

    Attributes:
        observations: to learn from.
        actions: to choose.
        signals: reward and, if there is one, discount.
        requested: unique ids of all observations that a step asks for.
    """

    observations: Layout
    actions: Layout
    signals: Layout
    requested: tuple[int, ...]

    @classmethod
    def of(cls, specs: pb.ActionObservationSpecs, options: SimulatorOptions) -> Interface:
        """
        Raises:
            TensorError: nothing can be learned from it; names the tensor, and what to do.
        """
        signals = [options.reward]
        if any(spec.name == options.discount for spec in specs.observations.values()):
            signals.append(options.discount)
        try:
            signal_specs = chosen(specs.observations, signals, (), "observation")
        except TensorError as error:
            raise TensorError(f"{error}; env_kwargs.reward names the reward") from None
        for spec in signal_specs:
            if spec.size != 1:
                raise TensorError(f"{spec.name!r} must be one number, not {list(spec.shape)}")
        seen = chosen(specs.observations, options.observations, signals, "observation")
        if (size := sum(spec.size * spec.dtype.itemsize for spec in seen)) > MAX_MESSAGE_BYTES:
            raise TensorError(f"its observations have {size} bytes, over {MAX_MESSAGE_BYTES}")
        return cls._of(
            Layout.of_specs(seen, "observation"),
            Layout.of_specs(chosen(specs.actions, options.actions, (), "action"), "action"),
            Layout.of_specs(signal_specs, "observation"),
        )

    @classmethod
    def _of(cls, observations: Layout, actions: Layout, signals: Layout) -> Interface:
        requested = tuple(spec.uid for spec in (*observations.specs, *signals.specs))
        return cls(observations, actions, signals, requested)

    def adopt(self, specs: pb.ActionObservationSpecs) -> Interface:
        """The same spaces, from specs that were sent anew.

        Raises:
            TensorError: they no longer fit; names what has changed.
        """
        return self._of(
            self.observations.adopt(specs.observations, "observation"),
            self.actions.adopt(specs.actions, "action"),
            self.signals.adopt(specs.observations, "observation"),
        )

    def write_actions(self, arrays: Mapping[Path, Any], row: int, step: pb.StepRequest) -> None:
        """Put one environment's actions into a request.

        Floats are clipped to the bounds, which simulators check: those of a policy may exceed them
        by rounding, or by far if no connector clips them.

        Args:
            arrays: all environments' [N, ...].
            row: the environment.
            step: the request.
        """
        for path, spec in zip(self.actions.paths, self.actions.specs, strict=True):
            action = np.asarray(arrays[path][row], spec.dtype)  # [*spec.shape]
            if spec.dtype.kind == "f" and (spec.low is not None or spec.high is not None):
                action = np.clip(action, spec.low, spec.high)
            encode(step.actions[spec.uid], spec, action)

    def read_observations(self, step: pb.StepResponse, row: int, into: Mapping[Path, Any]) -> None:
        """Copy the observations of a reply into one row of arrays [N, ...].

        Raises:
            TensorError: something is missing, or not what its spec says.
        """
        for path, spec in zip(self.observations.paths, self.observations.specs, strict=True):
            into[path][row] = decode(_given(step, spec), spec)

    def read_signals(self, step: pb.StepResponse) -> list[float]:
        """Reward and, if there is one, discount.

        Raises:
            TensorError: one is missing, or not what its spec says.
        """
        return [float(decode(_given(step, spec), spec).item()) for spec in self.signals.specs]


def _given(step: pb.StepResponse, spec: Spec) -> pb.Tensor:
    if spec.uid not in step.observations:
        raise TensorError(f"{spec.name!r} was requested, and is not in the reply")
    return step.observations[spec.uid]
