"""Converts rows of observations and actions between bytes and arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.environments.action_masks import LegalActions, find_non_binary
from juggler.gateway.session_errors import Code, SessionError
from juggler.runtime.connectors.leaves import at, holds_masks, observed_leaves
from juggler.runtime.episodes.batch import MOST_REWARD, TOO_LARGE
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.structures import choices_of, find_outside, space_leaves, zeros
from juggler.runtime.wire.trees import Path, Skeleton, Tree, dtype_to_number, flatten, path_name
from juggler.runtime.wire.v1 import simulator_pb2 as pb


class Leaf:
    """One array of a space."""

    def __init__(self, path: Path, space: Space[Any]) -> None:
        self.path = path
        self.space = space
        assert space.dtype is not None
        assert space.shape is not None
        self.dtype = np.dtype(space.dtype).newbyteorder("<")
        self.shape = space.shape
        self.row_bytes = self.dtype.itemsize * prod(self.shape)
        self.number = dtype_to_number(self.dtype)


class SpaceLayout:
    """The arrays of a space on the wire.

    Raises:
        UnsupportedSpace: it cannot be sent as arrays.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.leaves = [Leaf(path, leaf) for path, leaf in space_leaves(space)]
        self._places = {leaf.path: place for place, leaf in enumerate(self.leaves)}
        self._skeleton = Skeleton([leaf.path for leaf in self.leaves])

    def raw(self, tensors: Sequence[pb.NamedTensor], rows: int, what: str) -> list[bytes]:
        """Return the bytes of each leaf, in order.

        Raises:
            SessionError: an array is missing, unknown, or does not fit the space.
        """
        found: list[bytes | None] = [None] * len(self.leaves)
        if len(tensors) != len(self.leaves):
            named = ", ".join(path_name(leaf.path) for leaf in self.leaves[:20])
            raise SessionError(
                Code.WRONG_SHAPE, f"{len(tensors)} arrays of {what}: send one for each of {named}"
            )
        for tensor in tensors:
            place = self._places.get(tuple(tensor.path))
            if place is None or found[place] is not None:
                kind = "unknown" if place is None else "sent twice"
                raise SessionError(
                    Code.WRONG_SHAPE, f"{what} at {path_name(tuple(tensor.path))}: {kind}"
                )
            # NumPy would read any bytes of a fitting length, so dtype and shape are compared first.
            leaf, data = self.leaves[place], tensor.data
            given, expected = tuple(tensor.shape), (rows, *leaf.shape)
            if given != expected or tensor.dtype != leaf.number:
                raise SessionError(
                    Code.WRONG_SHAPE,
                    f"{what} at {path_name(leaf.path)}: dtype {tensor.dtype} and shape "
                    f"{list(given)}; send dtype {leaf.number} ({leaf.dtype}) and shape "
                    f"{list(expected)}, as the space says",
                )
            # A right shape may come with too few bytes.
            if len(data) != rows * leaf.row_bytes:
                raise SessionError(
                    Code.WRONG_SHAPE,
                    f"{what} at {path_name(leaf.path)}: {len(data)} bytes, and a shape of "
                    f"{list(expected)} takes {rows * leaf.row_bytes}",
                )
            found[place] = data
        return [data for data in found if data is not None]

    def tree(self, raws: Sequence[list[bytes]], rows: int) -> Tree:
        """Join several batches to arrays [rows, ...], in new memory."""
        arrays = []
        for place, leaf in enumerate(self.leaves):
            joined = bytearray().join([raw[place] for raw in raws])
            if leaf.dtype == np.bool_:
                array = np.frombuffer(joined, np.uint8) != 0
            else:
                array = np.frombuffer(joined, leaf.dtype)
            arrays.append(array.reshape(rows, *leaf.shape))  # [rows, ...]
        return self._skeleton.fill(arrays)


class AgentInterface:
    """The observations and actions of agents with equal spaces.

    Attributes:
        messages: the same as messages, which differ wherever the spaces do.
        nothing: [1, ...] placeholder of a missing observation.

    Raises:
        UnsupportedSpace: a space cannot be sent as arrays.
        ValueError: masks do not fit the actions.
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        self.spaces = observation_space, action_space
        self.messages = space_to_message(observation_space), space_to_message(action_space)
        self.observations, self.actions = SpaceLayout(observation_space), SpaceLayout(action_space)
        self._choices = choices_of(observed_leaves(observation_space).items())
        self._legal = LegalActions.of(observation_space, action_space)
        self.nothing = zeros(observation_space, (1,))
        if holds_masks(observation_space):
            for _, mask in flatten(at(self.nothing, (ACTION_MASK,))):
                mask[...] = 1

    def first_bad(self, observations: Tree, masks: bool = True) -> tuple[int, SessionError] | None:
        """Return the first unusable row and its error, or None.

        Args:
            masks: whether each action mask must allow an action.
        """
        for path, array in flatten(observations):
            if array.dtype.kind == "f" and not (within := _is_float32(array)).all():
                row = _first(within)
                return row, _not_float32(f"the observation{_at(path)}", array[row])
        # Encoders use these numbers as indices.
        if found := find_outside(self._choices, observations):
            (row, *_), what = found
            return row, SessionError(Code.WRONG_SHAPE, f"the observation{what}")
        if self._legal is None:
            return None
        given = at(observations, (ACTION_MASK,))
        if found := find_non_binary(given):
            (row, *_), what = found
            return row, SessionError(Code.NO_LEGAL_ACTION, what)
        for _, legal in self._legal.has_legal_action(given) if masks else ():
            if not legal.all():
                text = "its action mask allows no action: end the episode instead"
                return _first(legal), SessionError(Code.NO_LEGAL_ACTION, text)
        return None


def check_rewards(rewards: Sequence[float], whose: Callable[[int], str]) -> None:
    """Check that rewards are small enough for a learner to square returns.

    Args:
        whose: returns the origin of a reward for messages, by its index.
    """
    if sum(map(abs, rewards)) <= MOST_REWARD:  # false with a NaN
        return
    for at_place, each in enumerate(rewards):
        if not abs(each) <= MOST_REWARD:
            rule = "rewards must be finite numbers"
            if math.isfinite(each):
                rule = TOO_LARGE
            raise SessionError(
                Code.NOT_FINITE, f"the reward of {whose(at_place)} is {each:g}: {rule}"
            )


def read_infos(
    given: Sequence[float], count: int, names: int, what: str
) -> NDArray[np.float64] | None:
    """Return numbers [count, K] of rows or steps; None: no numbers.

    Args:
        count: number of rows or steps.
        names: K, number of `info_names` of the hello.
    """
    if not given:
        return None
    if len(given) != count * names:
        text = f"{len(given)} infos for {count} {what}, and the hello has {names} info_names"
        rule = "send one number for each name in each of them, NaN where there is none"
        raise SessionError(Code.WRONG_SHAPE, f"{text}: {rule}")
    return np.array(given, np.float64).reshape(count, names)


def _is_float32(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which numbers [...] are finite in float32, the dtype of policies."""
    is_wide = array.dtype.itemsize > 4
    good = np.abs(array) <= np.finfo(np.float32).max if is_wide else np.isfinite(array)
    return np.asarray(good)


def _first(good: NDArray[np.bool_]) -> int:
    """Return the first row of [rows, ...] that is not all good."""
    return int(good.reshape(len(good), -1).all(1).argmin())


def _not_float32(what: str, row: NDArray[Any]) -> SessionError:
    text = f"{what} is NaN or infinite: the simulator must give finite numbers"
    if np.isfinite(row).all():
        text = f"{what} is beyond float32, in which policies compute: scale it"
    return SessionError(Code.NOT_FINITE, text)


def _at(path: Path) -> str:
    return f" at {path_name(path)}" if path else ""
