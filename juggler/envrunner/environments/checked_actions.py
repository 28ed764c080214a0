"""A faster look at whether actions are valid, which vectors of environments take in each step."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import MultiDiscrete
from gymnasium.vector import VectorEnv


class EqualChoices(MultiDiscrete):
    """A MultiDiscrete whose numbers all have the same bounds: N equal choices from 0 on.

    `contains` answers as Gymnasium's does, for arrays of its own shape and dtype in a quarter of
    the time.
    """

    def contains(self, x: Any) -> bool:
        if type(x) is not np.ndarray or x.dtype != np.int64 or x.shape != self.nvec.shape:
            return super().contains(x)
        # As unsigned numbers, negative ones are the greatest.
        return bool(np.maximum.reduce(x.view(np.uint64), axis=None) < self.nvec.item(0))


def check_actions_faster(env: VectorEnv[Any, Any, Any]) -> None:
    """Let a vector look at its actions in less time, if they are equal choices of its own."""
    inner = env.unwrapped
    space = vars(inner).get("action_space")
    if type(space) is not MultiDiscrete or space.dtype != np.int64 or not space.nvec.size:
        return
    if not space.start.any() and (space.nvec == space.nvec.item(0)).all():
        space.__class__ = EqualChoices  # as it is otherwise, with its random numbers
