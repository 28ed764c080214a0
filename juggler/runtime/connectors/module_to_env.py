"""An EnvRunner's pipeline from the policy's actions to the environment's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gymnasium import spaces

from juggler.runtime.connectors.connector import ActionConnector, Space
from juggler.runtime.connectors.leaves import LeafFunctions, acted_dtype, in_dtype
from juggler.runtime.wire.structures import from_tree, space_leaves


class ModuleToEnv:
    """Action connectors, one after the other, and a conversion to the environment's dtypes.

    Args:
        connectors: the pieces; those with nothing to do are left out.
        action_space: the space in which the policy acts.
        env_action_space: the environment's space.

    Attributes:
        action_space: the space in which the policy acts.
        idle: whether the environment gets actions unchanged.
        connectors: the pieces that have something to do.
    """

    def __init__(
        self, connectors: Sequence[ActionConnector], action_space: Space, env_action_space: Space
    ) -> None:
        self.action_space = action_space
        self.connectors = [connector for connector in connectors if not connector.idle]
        self._env_action_space = env_action_space
        self._one_array = not isinstance(env_action_space, spaces.Dict | spaces.Tuple)
        self._casts = LeafFunctions(
            {
                path: partial(in_dtype, dtype=leaf.dtype)
                for path, leaf in space_leaves(env_action_space)
                if leaf.dtype != acted_dtype(leaf)
            }
        )
        self._acted = LeafFunctions(
            {
                path: partial(in_dtype, dtype=acted_dtype(leaf))
                for path, leaf in space_leaves(action_space)
            }
        )
        self.idle = self._one_array and not self.connectors and not self._casts.functions

    def __call__(self, actions: Any) -> Any:
        """The environment's actions, as Gymnasium expects them, for a tree of actions [N, ...]."""
        for connector in self.connectors:
            actions = connector(actions)
        if self._casts.functions:
            actions = self._casts(actions)
        return actions if self._one_array else from_tree(self._env_action_space, actions)

    def undo(self, actions: Any) -> Any:
        """What the policy would have chosen, in its dtypes, for a tree [N, ...] of the
        environment's actions.

        Raises:
            NotImplementedError: a connector cannot tell; names it.
        """
        for connector in reversed(self.connectors):
            actions = connector.undo(actions)
        return self._acted(actions)
