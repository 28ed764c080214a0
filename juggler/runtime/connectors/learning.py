"""Connectors of the learner, which change rewards or add columns."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

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
from juggler.runtime.connectors.row_times import first_observations, following, linear_recurrence
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import first_leaf, tree_map

#: "count" [], "mean" [...] and "m2" [...], the sum of squared deviations from the mean; float64.
TensorMoments = dict[str, Tensor]


def no_moments(shape: Sequence[int] = ()) -> TensorMoments:
    """Return the moments of no numbers."""
    nothing = torch.zeros((), dtype=torch.float64)  # []
    zeros = torch.zeros(tuple(shape), dtype=torch.float64)  # [...]
    return {"count": nothing, "mean": zeros, "m2": zeros}


def with_live(
    moments: Mapping[str, Tensor], x: Tensor, live: Tensor, sums: Callable[[Tensor], Tensor]
) -> TensorMoments:
    """Return the moments with further numbers.

    Sums are over differences from the earlier mean, which all learners share: so they lose no
    digits.

    Args:
        moments: of earlier numbers [...].
        x: [B, ...], further numbers.
        live: [B] bool, whether each number counts.
        sums: adds up numbers over the learners of a group.
    """
    old = {key: value.to(x.device) for key, value in moments.items()}
    counted = live.view(-1, *[1] * (x.ndim - 1))  # [B, ...]
    apart = torch.where(counted, x.double() - old["mean"], 0.0)  # [B, ...]
    own = [live.sum().double().view(1), apart.sum(0).view(-1), apart.square().sum(0).view(-1)]
    size = own[1].numel()
    added, total, squares = torch.split(sums(torch.cat(own)), [1, size, size])
    total, squares = total.view(x.shape[1:]), squares.view(x.shape[1:])  # [...] both
    count = old["count"] + added.squeeze(0)  # []
    # Of old and new numbers together, about the old mean: their mean, and their squares.
    moved = total / count.clamp(min=1)  # [...]
    return {
        "count": count,
        "mean": old["mean"] + moved,
        "m2": (old["m2"] + squares - moved * total).clamp(min=0),
    }


def variance(moments: Mapping[str, Tensor]) -> Tensor:
    """Return the variance [...] of the numbers; 0 without numbers."""
    return moments["m2"] / moments["count"].clamp(min=1)  # [...]


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
    """The EnvRunner's half of normalize_rewards: each row's discounted return.

    Observations pass unchanged. The context is R of the step before, or 0 at an episode's start:

        R_t = gamma R_{t-1} + r_t
    """

    for_acting = False

    def __init__(self, observation_space: Space, action_space: Space, gamma: float = 0.99) -> None:
        super().__init__(observation_space, action_space)
        self._gamma = np.float32(_discount(gamma))

    def initial(self, observations: Any) -> Any:
        return np.zeros(len(first_leaf(observations)), np.float32)

    def __call__(self, observations: Any, context: Any) -> Any:
        return observations

    def advance(
        self, context: Any, observations: Any, actions: Any, rewards: NDArray[np.float32]
    ) -> Any:
        return self._gamma * context + rewards

    def over_rows(self, columns: Columns, context: Any) -> Columns:
        return columns


class NormalizeRewards(LearnerConnector):
    """Divides rewards by the discounted return's standard deviation, and clips them.

    The deviation is of R_t = gamma R_{t-1} + r_t, over the live steps of all batches so far,
    including this one, at all learners of the group. Rewards keep their sign.

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
        returns = self._returns(columns).flatten()  # [N T]
        self._state = with_live(self._state, returns, live.flatten(), self.sums)
        scale = torch.rsqrt(variance(self._state) + self._epsilon).to(rewards.dtype)  # []
        return columns | {c.REWARDS: (rewards * scale).clamp(-self._limit, self._limit)}

    def get_state(self) -> dict[str, Tensor]:
        return dict(self._state)

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        self._state = {key: state[key].to(torch.float64) for key in self._state}

    def _returns(self, columns: Columns) -> Tensor:
        """Return R of every step [N, T]."""
        before = columns[c.STATES][c.CONNECTOR_STATES][DISCOUNTED_RETURNS]  # [N]
        carried = self._gamma * ~first_observations(columns)  # [N, T]
        # linear_recurrence runs backwards in time.
        backwards = linear_recurrence(carried.flip(1), columns[c.REWARDS].flip(1), before)
        return backwards.flip(1)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} = {value}: must be above 0 and finite")
    return value


def _discount(gamma: float) -> float:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma = {gamma}: must be at least 0 and at most 1")
    return gamma


NEXT_OBSERVATIONS: Final = "next_observations"
RETURNS_TO_GO: Final = "returns_to_go"


class NextObservations(LearnerConnector):
    """Adds the column "next_observations" [N, T, ...]: the observation after each step.

    If the episode was truncated, it is the final observation. If it terminated, there is no next
    observation, and the value in the column has no meaning.
    """

    def __call__(self, columns: Columns) -> Columns:
        index = following(columns)  # [N, T]
        return columns | {
            NEXT_OBSERVATIONS: tree_map(
                lambda before, last, final: torch.cat([before.flatten(0, 1), last, final])[index],
                columns[c.OBSERVATIONS],
                columns[c.LAST_OBSERVATIONS],
                columns[c.FINAL_OBSERVATIONS],
            )
        }


class ReturnsToGo(LearnerConnector):
    """Adds the column "returns_to_go" [N, T]: discounted rewards from each step onward.

    The sum ends with the episode or with the row. Later rewards are not in the batch, and no value
    estimate replaces them. Steps that are not live have 0.

    Args:
        gamma: the discount.
    """

    def __init__(self, observation_space: Space, action_space: Space, gamma: float = 0.99) -> None:
        super().__init__(observation_space, action_space)
        self._gamma = _discount(gamma)

    def __call__(self, columns: Columns) -> Columns:
        rewards, live = columns[c.REWARDS], columns[c.LIVE]  # [N, T] both
        continues = live & ~columns[c.TERMINATED] & ~columns[c.TRUNCATED]  # [N, T]
        after: Tensor = torch.zeros_like(rewards[:, 0])  # [N]
        returns = linear_recurrence(self._gamma * continues, rewards, after)  # [N, T]
        return columns | {RETURNS_TO_GO: returns}


#: Columns without the dimensions [N, T], and `live`, which is true at every step of an episode.
_NOT_STEPS: Final = {c.LIVE, c.STATES, *c.SEGMENTS, *c.FINALS}.union(
    c.OBSERVED[1:], c.OBSERVED_BY_CRITIC[1:]
)


class PerEpisode(LearnerConnector):
    """Calls a method for each segment of an episode within a row.

    This makes a Python call for each segment and waits for the device; a connector over whole
    batches is a hundred times faster. A subclass defines `episode`:

        class RewardAtTheEnd(PerEpisode):
            def episode(self, steps, offset):
                rewards = torch.zeros_like(steps["rewards"])
                rewards[-1] = steps["rewards"].sum()
                return {"rewards": rewards}
    """

    @abstractmethod
    def episode(self, steps: dict[str, Any], offset: int) -> Mapping[str, Tensor]:
        """Return changed or new columns; {}: none.

        Args:
            steps: the segment's step columns [L, ...] by name. Do not change them.
            offset: the number of earlier steps of the same episode.

        Returns:
            Columns [L, ...] by name. Steps outside episodes keep their values, and have 0 in new
                columns.
        """

    def __call__(self, columns: Columns) -> Columns:
        live = columns[c.LIVE]  # [N, T]
        changed: dict[str, Tensor] = {}
        stretches = torch.stack([columns[name] for name in c.SEGMENTS], 1)  # [S, 4]
        for row, start, length, offset in stretches.tolist():
            at = (row, slice(start, start + length))
            steps = {
                name: tree_map(lambda column, at=at: column[at], columns[name])
                for name in columns.keys() - _NOT_STEPS
            }
            for name, values in self.episode(steps, offset).items():
                if len(values) != length:
                    raise ValueError(
                        f"{type(self).__name__}.episode returned {name!r} of {len(values)} steps "
                        f"for an episode of {length}"
                    )
                # Copied at the first change, since the batch belongs to the caller.
                if name not in changed:
                    changed[name] = _own(columns.get(name), live, values)
                changed[name][at] = values.to(changed[name].dtype)
        return columns | changed


def _own(column: Any, live: Tensor, values: Tensor) -> Tensor:
    """Copy a column, or write values [L, ...] into a new one."""
    if column is None:
        return values.new_zeros((*live.shape, *values.shape[1:]))
    assert isinstance(column, Tensor)
    return column.clone()
