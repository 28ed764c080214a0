"""Checks the observations that people pass to a policy, and makes a batch of them."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from juggler.envrunner.environments.action_masks import read_masks
from juggler.envrunner.environments.legal_actions import LegalActions, find_non_binary
from juggler.runtime.connectors.leaves import OBSERVATION, holds_masks
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.choices import choices_of
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Path, path_name

Space = gymnasium.Space[Any]


class Observed:
    """Reads observations of a space, single ones or a batch.

    The number of dimensions tells them apart: an observation has those of its space, and every part
    of a batch has one more in front.

    Args:
        space: space of one observation.
        action_space: space of one action of the environment.

    Raises:
        ValueError: the space has action masks that do not fit the actions.
    """

    def __init__(self, space: Space, action_space: Space) -> None:
        self._space, self._action_space = space, action_space
        self._legal = LegalActions.of(space, action_space, "")

    def __call__(self, observation: Any, mask: Any) -> tuple[Any, int | None]:
        """Read an observation or a batch.

        Args:
            observation: a value of the space, or a batch as vectors of environments give it.
            mask: infos["action_mask"], if the observation does not contain it; or None.

        Returns:
            A tree of newly allocated arrays [N, ...] in the dtypes of the space; and N, or None for
                a single observation, whose tree is a batch of one.

        Raises:
            ValueError: the observation is not in the space; says what is expected.
        """
        if mask is not None:
            observation = self._with_mask(observation, mask)
        found: dict[Path, tuple[int, ...]] = {}  # the leading dimension of each leaf, if any
        tree = _read(self._space, observation, (), found)
        leading = set(found.values())
        if len(leading) > 1:
            raise ValueError(
                "the parts of an observation belong to batches of different sizes: "
                + ", ".join(f"{path_name(path)} {list(n) or 'none'}" for path, n in found.items())
            )
        (shape,) = leading
        batch = tree if shape else tree_map(lambda array: array[None], tree)  # [N, ...]
        if self._legal is not None:
            _require_zeros_and_ones(batch[ACTION_MASK], shape)
            self._require_legal(batch[ACTION_MASK])
        return batch, shape[0] if shape else None

    def _with_mask(self, observation: Any, mask: Any) -> dict[str, Any]:
        """The observation as a run keeps it whose environment gives masks in its infos."""
        if not isinstance(self._space, spaces.Dict) or not holds_masks(self._space):
            raise ValueError("mask: this policy's environment gave no action masks; leave it out")
        # An observation that is not a Dict comes under a key of its own.
        keys = self._space.spaces.keys() - {ACTION_MASK}
        by_key = isinstance(observation, Mapping) and (
            keys != {OBSERVATION} or OBSERVATION in observation
        )
        children = dict(observation) if by_key else {OBSERVATION: observation}
        plain = spaces.Dict({key: self._space[key] for key in keys})
        found: dict[Path, tuple[int, ...]] = {}
        _read(plain, children, (), found)
        shape = next(iter(found.values()))
        given, rows = (mask, shape[0]) if shape else ([mask], 1)
        _require_rows(given, rows)
        try:
            masks = read_masks(self._action_space, given, np.arange(rows))  # [N, n]
        except (IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"mask: expected what the environment says in info['action_mask'], not {mask!r}"
            ) from error
        _require_zeros_and_ones(masks, shape)  # before they are cast to the dtype of the space
        legal = tree_map(lambda mask: (mask if shape else mask[0]) != 0, masks)  # [N, n] or [n]
        return {**children, ACTION_MASK: legal}

    def _require_legal(self, masks: Any) -> None:
        assert self._legal is not None
        for path, legal in self._legal.has_legal_action(masks):
            if not legal.all():
                which = f" for {path_name(path)}" if path else ""
                row = f" in row {int(legal.argmin())}" if len(legal) > 1 else ""
                raise ValueError(
                    f"the action mask has no legal action{which}{row}: where an episode is over, "
                    "ask for none, or give a mask of ones"
                )


def _require_rows(given: Any, rows: int, where: str = "") -> None:
    """
    Args:
        given: masks that should have this many rows: a sequence of them, or by key.
    """
    if isinstance(given, Mapping):
        for key, masks in given.items():
            _require_rows(masks, rows, f" at {key}")
    elif isinstance(given, Sized) and len(given) != rows:
        raise ValueError(f"mask: there are {len(given)} masks{where} for {rows} observations")


def _require_zeros_and_ones(masks: Any, batch: tuple[int, ...]) -> None:
    """
    Args:
        masks: [N, ...]
        batch: (N,), or () for those of a single observation.
    """
    if found := find_non_binary(masks):
        (row, *_), what = found
        raise ValueError(f"{what}, in row {row}" if batch else what)


def _read(space: Space, value: Any, path: Path, found: dict[Path, tuple[int, ...]]) -> Any:
    """A value as a tree of arrays; the leading dimension of each leaf goes into `found`."""
    where = f" at {path_name(path)}" if path else ""
    if not path and not isinstance(space, spaces.Tuple) and _is_of_reset(value):
        raise ValueError(
            "the observation is a pair with a dict, such as the (observation, info) of reset: pass "
            "the observation alone"
        )
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            raise ValueError(f"the observation{where} must be a Dict, as {space}, not {value!r}")
        if value.keys() != space.spaces.keys():
            hint = ""
            if ACTION_MASK in space.spaces and ACTION_MASK not in value:
                hint = ": where the environment gives masks in its infos, pass mask="
            raise ValueError(
                f"the observation{where} has the keys {sorted(map(str, value))}, not "
                f"{sorted(space.spaces)}{hint}"
            )
        return {
            key: _read(child, value[key], (*path, key), found)
            for key, child in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            raise ValueError(
                f"the observation{where} must be a tuple of {len(space.spaces)} parts, as {space}, "
                f"not {value!r}"
            )
        return {
            str(i): _read(child, value[i], (*path, str(i)), found)
            for i, child in enumerate(space.spaces)
        }
    array = _leaf(space, value, path)
    found[path] = array.shape[: array.ndim - len(space.shape or ())]
    return array


def _is_of_reset(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def _leaf(space: Space, value: Any, path: Path) -> NDArray[Any]:
    where = f" at {path_name(path)}" if path else ""
    dtype, shape = np.dtype(space.dtype), tuple(space.shape or ())
    if isinstance(value, Mapping):
        raise ValueError(
            f"the observation{where} is a map with the keys {sorted(map(str, value))}: expected an "
            f"array, as {space}"
        )
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"the observation{where} is not an array: {error}") from error
    extra = array.ndim - len(shape)
    if extra not in (0, 1) or array.shape[extra:] != shape or 0 in array.shape[:extra]:
        raise ValueError(
            f"the observation{where} has shape {list(array.shape)}: expected {list(shape)}, or "
            f"{['N', *shape]} for a batch".replace("'N'", "N")
        )
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"the observation{where} is {array.dtype}: expected {dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"the observation{where} has numbers that are not finite")
    for choice in choices_of([(path, space)]) if path[:1] != (ACTION_MASK,) else ():
        if (found := choice.outside(array)) is not None:
            raise ValueError(f"the observation{choice.told(array[found])}")
    # A copy, because environments may write the next observation into the same memory.
    return array.astype(dtype)
