"""Stacks observations of agents with equal spaces, with their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from juggler.envrunner.environments.action_masks import flat_mask, mask_space
from juggler.envrunner.environments.legal_actions import LegalActions, find_non_binary
from juggler.envrunner.environments.misfits import misfit
from juggler.envrunner.multi_agent.turns import AgentGroup
from juggler.runtime.connectors.leaves import OBSERVATION, at, holds_masks
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import space_leaves, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Path, Tree, unflatten


class Misfit(Exception):
    """An observation or an action mask does not fit its space.

    Attributes:
        row: of the observation.
        reason: one line.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row = row
        self.reason = reason


class GroupObservations:
    """Batches the observations of one group.

    Action masks in the agents' infos become part of their observations, as in environments with one
    agent: a Dict gets the key "action_mask", and any other observation becomes a Dict with the keys
    "observation" and "action_mask".

    Args:
        plain: the agents, with their spaces in the environment.
        mask: in the info of one of them at the beginning of an episode; None: no mask.

    Attributes:
        group: the agents, with the observation space of the batches.

    Raises:
        ValueError: `mask` does not fit the actions.
        UnsupportedSpace: a space has no encoding.
    """

    def __init__(self, plain: AgentGroup, mask: Any) -> None:
        self._plain = plain.observation_space
        self._actions = plain.action_space
        self._leaves = space_leaves(self._plain)
        self._mask: spaces.Space[Any] | None = None
        self.group = plain
        self._ignores = holds_masks(self._plain)  # the observations already have masks
        if mask is not None and not self._ignores:
            try:
                self._mask = mask_space(flat_mask(self._actions, mask))
                LegalActions(self._mask, self._actions, "")
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                agents = ", ".join(plain.agents)
                raise ValueError(
                    f"info['action_mask'] of {agents} does not fit the action space: {error}"
                ) from error
            parts = (
                self._plain.spaces
                if isinstance(self._plain, spaces.Dict)
                else {OBSERVATION: self._plain}
            )
            space = spaces.Dict({**parts, ACTION_MASK: self._mask})
            self.group = AgentGroup(plain.agents, space, self._actions)
        LegalActions.of(self.group.observation_space, self._actions, "")
        self._none = zeros(self.group.observation_space, (0,))

    def batch(self, observations: Sequence[Any], given: Sequence[Any], last: bool = False) -> Tree:
        """Stack observations.

        Args:
            observations: of B agents, as the environment gave them.
            given: B action masks from the infos; None: no mask.
            last: they are the last of their episodes; a missing mask becomes all ones.

        Returns:
            A new tree [B, ...].

        Raises:
            Misfit: an observation does not fit the space, or a mask is missing or invalid.
        """
        if not observations:
            return self._none
        plain = stacked(self._plain, self._leaves, observations)
        if self._ignores:
            return plain
        if self._mask is not None:
            masks = self._masks(self._mask, given, last)
            # A Tuple's values are a dict in trees, too.
            if isinstance(self._plain, spaces.Dict) and isinstance(plain, Mapping):
                return {**plain, ACTION_MASK: masks}
            return {OBSERVATION: plain, ACTION_MASK: masks}
        for row, mask in enumerate(given):
            if mask is not None:
                raise Misfit(row, "its info has an action mask, and had none in the first reset")
        return plain

    def _masks(self, space: spaces.Space[Any], given: Sequence[Any], last: bool) -> Tree:
        flat = []
        for row, mask in enumerate(given):
            if mask is None and not last:
                raise Misfit(row, "its info had an action mask before, and here it has none")
            try:
                each = _everything(space) if mask is None else flat_mask(self._actions, mask)
                # A mask may also be floats of 0.0 and 1.0.
                why = misfit(space, tree_map(_as_int8, each), ACTION_MASK)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise Misfit(
                    row, f"info['action_mask'] does not fit the action space: {error}"
                ) from None
            if why:
                raise Misfit(row, f"the action mask in its info does not fit: {why}")
            flat.append(each)
        masks: Tree = tree_map(lambda *each: np.stack(each), *flat)  # [B, n] each
        if found := find_non_binary(masks):
            (row, *_), what = found
            raise Misfit(row, what)
        binary: Tree = tree_map(_as_int8, masks)  # [B, n] each
        return binary


def _as_int8(mask: NDArray[Any]) -> NDArray[np.int8]:
    return mask.astype(np.int8, copy=False)


def stacked(
    space: spaces.Space[Any],
    leaves: Sequence[tuple[Path, spaces.Space[Any]]],
    values: Sequence[Any],
    what: str = "observation",
) -> Tree:
    """Stack B values of a space to a new tree [B, ...].

    Args:
        space: of the values.
        leaves: as from `space_leaves`.
        values: as an environment gave them.
        what: name of a value in errors.

    Raises:
        Misfit: a value does not fit the space.
    """
    try:
        # Values of Dicts are trees, unless they contain Tuples.
        trees = [to_tree(space, each) for each in values] if _has_tuples(space) else values
        return unflatten(
            (path, _stacked([at(tree, path) for tree in trees], leaf)) for path, leaf in leaves
        )
    except Exception:  # to check each value every time takes too long
        for row, value in enumerate(values):
            if why := misfit(space, value, what):
                raise Misfit(row, why) from None
        raise


def _has_tuples(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict):
        return any(map(_has_tuples, space.spaces.values()))
    return isinstance(space, spaces.Tuple)


def _everything(space: spaces.Space[Any]) -> Any:
    """Return the mask that allows every action."""
    return tree_map(np.ones_like, zeros(space))


def _stacked(values: list[Any], space: spaces.Space[Any]) -> NDArray[Any]:
    """Stack values of a space without Dict or Tuple: [B, ...].

    Raises:
        ValueError: they do not fit the space.
    """
    batch = np.array(values)  # [B, ...]
    shape = (len(values), *(space.shape or ()))
    if batch.shape != shape or not np.can_cast(batch.dtype, np.dtype(space.dtype), "same_kind"):
        raise ValueError(f"values of {space} must not be {batch.dtype} of shape {batch.shape}")
    return batch.astype(space.dtype, copy=False)
