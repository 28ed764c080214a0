"""The connectors clip_rewards, scale_rewards and normalize_rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.connector import (
    Columns,
    ContextConnector,
    LearnerConnector,
    Space,
)
from juggler.runtime.connectors.recurrence import linear_recurrence
from juggler.runtime.connectors.rows import first_observations
from juggler.runtime.connectors.tensor_moments import no_moments, variance, with_live
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

#: The name under which `NormalizeRewards` finds the context of `DiscountedReturns`.
DISCOUNTED_RETURNS = "discounted_returns"


class ClipRewards(LearnerConnector):
    """Clips rewards to [-limit, limit].

    Mnih et al. 2015, "Human-level control through deep reinforcement learning", clip to [-1, 1].
    """

    uses_observations = False

    def __init__(self, observation_space: Space, action_space: Space, limit: float = 1.0) -> None:
        super().__init__(observation_space, action_space)
        self._limit = _positive("limit", limit)

    def __call__(self, columns: Columns) -> Columns:
        return columns | {c.REWARDS: columns[c.REWARDS].clamp(-self._limit, self._limit)}


class ScaleRewards(LearnerConnector):
    """Multiplies rewards by a factor."""

    uses_observations = False

    def __init__(self, observation_space: Space, action_space: Space, factor: float) -> None:
        super().__init__(observation_space, action_space)
        self._factor = _positive("factor", factor)

    def __call__(self, columns: Columns) -> Columns:
        return columns | {c.REWARDS: columns[c.REWARDS] * self._factor}


class DiscountedReturns(ContextConnector):
    """The EnvRunner's half of normalize_rewards: each row's discounted return so far.

    Observations pass unchanged. The context is R of the step before, 0 at an episode's start:

        R_t = gamma R_{t-1} + r_t
    """

    for_acting = False

    def __init__(self, observation_space: Space, action_space: Space, gamma: float = 0.99) -> None:
        super().__init__(observation_space, action_space)
        self._gamma = np.float32(_discount(gamma))

    def initial(self, observations: Any) -> Any:
        lengths: list[int] = []
        tree_map(lambda array: lengths.append(len(array)), observations)
        return np.zeros(lengths[0], np.float32)

    def __call__(self, observations: Any, context: Any) -> Any:
        return observations

    def advance(
        self, context: Any, observations: Any, actions: Any, rewards: NDArray[np.float32]
    ) -> Any:
        return self._gamma * context + rewards

    def over_rows(self, columns: Columns, context: Any) -> Columns:
        return columns


class NormalizeRewards(LearnerConnector):
    """Divides rewards by the standard deviation of the discounted return so far, and clips them.

    It is the deviation of R_t = gamma R_{t-1} + r_t over the live steps of all batches up to and
    including this one, those of other learners of the group among them. Rewards keep their sign.

    Args:
        gamma: the discount.
        limit: results are clipped to [-limit, limit].
        epsilon: added to the variance.
    """

    uses_observations = False

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        gamma: float = 0.99,
        limit: float = 10.0,
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__(observation_space, action_space)
        self._gamma = _discount(gamma)
        self._limit = _positive("limit", limit)
        self._epsilon = _positive("epsilon", epsilon)
        self._state = no_moments()

    def __call__(self, columns: Columns) -> Columns:
        rewards, live = columns[c.REWARDS], columns[c.LIVE]  # [N, T] both
        self._merge(self._returns(columns), live)
        scale = torch.rsqrt(variance(self._state) + self._epsilon).to(rewards.dtype)  # []
        return columns | {c.REWARDS: (rewards * scale).clamp(-self._limit, self._limit)}

    def get_state(self) -> dict[str, Tensor]:
        return dict(self._state)

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        self._state = {key: state[key].to(torch.float64) for key in self._state}

    def _returns(self, columns: Columns) -> Tensor:
        """R of every step [N, T]."""
        before = columns[c.STATES][c.CONNECTOR_STATES][DISCOUNTED_RETURNS]  # [N]
        carried = self._gamma * ~first_observations(columns)  # [N, T]
        # linear_recurrence runs backwards in time.
        backwards = linear_recurrence(carried.flip(1), columns[c.REWARDS].flip(1), before)
        return backwards.flip(1)

    def _merge(self, returns: Tensor, live: Tensor) -> None:
        """Merge the live returns [N, T] of all learners into the moments."""
        self._state = with_live(self._state, returns.flatten(), live.flatten(), self.sums)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} = {value}: must be above 0 and finite")
    return value


def _discount(gamma: float) -> float:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma = {gamma}: must be at least 0 and at most 1")
    return gamma
