"""Checks batches against their module's spaces and state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from juggler.runtime.connectors.leaves import acted_dtype
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.columns import OBSERVED, OBSERVED_BY_CRITIC
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.structures import choices_of, space_leaves
from juggler.runtime.wire.trees import Path, Tree, flatten, path_name, unflatten

Space = gymnasium.Space[Any]


class BatchValidator:
    """Checks batches of one module.

    Args:
        module: the module's id, for messages.
        observation_space: of the observations in its batches.
        action_space: of the actions in its batches.
        states: the expected `EpisodeBatch.states` of one row, a tree of arrays [...]; {}: none.
        critic_space: of the observations of its critic; None: its batches have none.

    Raises:
        UnsupportedSpace: Juggler cannot encode one of the spaces.
    """

    def __init__(
        self,
        module: str,
        observation_space: Space,
        action_space: Space,
        states: Tree,
        critic_space: Space | None = None,
    ) -> None:
        self.module = module
        observed = dict(space_leaves(observation_space))
        seen = {} if critic_space is None else dict(space_leaves(critic_space))
        self._observed = dict.fromkeys(OBSERVED, observed) | dict.fromkeys(OBSERVED_BY_CRITIC, seen)
        self._actions = dict(space_leaves(action_space))
        self._acted = {path: acted_dtype(space) for path, space in self._actions.items()}
        self._states = dict(flatten(states))

    def checked(self, batch: EpisodeBatch) -> EpisodeBatch:
        """Check a batch; return it with actions in canonical dtypes.

        So batches of several EnvRunners fit into one update.

        Raises:
            WireError: the batch does not fit; names the array.
        """
        leading_dimensions = 2 * ("N, T", "N", "K")
        for (column, expected), leading in zip(
            self._observed.items(), leading_dimensions, strict=True
        ):
            arrays = self._arrays(column, getattr(batch, column), expected)
            for path, array in arrays.items():
                space = expected[path]
                self._check(column, path, array, space, leading, array.dtype == space.dtype)
        actions = self._arrays("actions", batch.actions, self._actions)
        for path, array in actions.items():
            space = self._actions[path]
            # A policy acts in float32 if the space is float64, so only the kind must fit.
            self._check("actions", path, array, space, "N, T", _kind(array) == _kind(space))
        states = self._arrays("states", batch.states, self._states)
        for path, array in states.items():
            like = self._states[path]
            if array.dtype != like.dtype or array.shape[1:] != like.shape:
                raise WireError(
                    f"{self._name('states', path)} of shape [N, *{array.shape[1:]}] and dtype "
                    f"{array.dtype} do not fit the module's, [N, *{like.shape}] of {like.dtype}"
                )
        if all(array.dtype == self._acted[path] for path, array in actions.items()):
            return batch
        kept = [
            (path, array.astype(self._acted[path], copy=False)) for path, array in actions.items()
        ]
        return replace(batch, actions=unflatten(kept))

    def _arrays(
        self, column: str, tree: Tree, expected: dict[Path, Any]
    ) -> dict[Path, NDArray[Any]]:
        arrays = dict(flatten(tree))
        if odd := arrays.keys() ^ expected.keys():
            odd_one = min(odd)
            which = "have" if odd_one in arrays else "lack"
            names = ", ".join(path_name(path) for path in expected) or "none"
            raise WireError(
                f"{self._name(column, ())} {which} an array at {path_name(odd_one)}; "
                f"expected: {names}"
            )
        return arrays

    def _check(
        self,
        column: str,
        path: Path,
        array: NDArray[Any],
        space: Space,
        leading: str,
        right_dtype: bool,
    ) -> None:
        shape = array.shape[leading.count(",") + 1 :]
        if not right_dtype or shape != space.shape:
            raise WireError(
                f"{self._name(column, path)} of shape [{leading}, *{shape}] and dtype "
                f"{array.dtype} do not fit the space {space}"
            )
        # These are indices, and one out of range would break the update.
        for choice in choices_of([((), space)]):
            if choice.outside(array) is not None:
                raise WireError(
                    f"{self._name(column, path)} hold a number outside "
                    f"{np.array(choice.first).tolist()}..{np.array(choice.last).tolist()}"
                )

    def _name(self, column: str, path: Path) -> str:
        return f"{self.module}: {'/'.join((column, *path))}"


def _kind(of: NDArray[Any] | Space) -> str:
    kind = np.dtype(of.dtype).kind
    return "i" if kind == "u" else kind
