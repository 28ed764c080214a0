"""The connectors next_observations and returns_to_go, which add columns in the learner."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from juggler.runtime.connectors.connector import Columns, LearnerConnector, Space
from juggler.runtime.connectors.recurrence import linear_recurrence
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

NEXT_OBSERVATIONS: Final = "next_observations"
RETURNS_TO_GO: Final = "returns_to_go"


class NextObservations(LearnerConnector):
    """Adds the column "next_observations" [N, T, ...]: the observation after each step.

    If the episode was truncated, it is the final observation. If it terminated, there is none, and
    the value in the column has no meaning.
    """

    def __call__(self, columns: Columns) -> Columns:
        n, t = columns[c.LIVE].shape
        final_rows, final_steps = columns[c.FINAL_ROWS], columns[c.FINAL_STEPS]  # [K] both
        # Indices into all observations in a row: those before each step, then last and final ones.
        index = torch.arange(1, n * t + 1, device=final_rows.device).view(n, t)  # [N, T]
        index[:, -1] = torch.arange(n * t, n * t + n, device=index.device)
        finals = torch.arange(len(final_rows), device=index.device) + n * t + n  # [K]
        index[final_rows, final_steps] = finals
        return columns | {
            NEXT_OBSERVATIONS: tree_map(
                lambda before, last, final: torch.cat([before.flatten(0, 1), last, final])[index],
                columns[c.OBSERVATIONS],
                columns[c.LAST_OBSERVATIONS],
                columns[c.FINAL_OBSERVATIONS],
            )
        }


class ReturnsToGo(LearnerConnector):
    """Adds the column "returns_to_go" [N, T]: discounted rewards from each step on.

    The sum ends with the episode or with the row. Later rewards are not in the batch, and no value
    estimate replaces them. Steps that are not live have 0.

    Args:
        gamma: the discount.
    """

    def __init__(self, observation_space: Space, action_space: Space, gamma: float = 0.99) -> None:
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma = {gamma}: must be at least 0 and at most 1")
        super().__init__(observation_space, action_space)
        self._gamma = gamma

    def __call__(self, columns: Columns) -> Columns:
        rewards, live = columns[c.REWARDS], columns[c.LIVE]  # [N, T] both
        goes_on = live & ~columns[c.TERMINATED] & ~columns[c.TRUNCATED]  # [N, T]
        after: Tensor = torch.zeros_like(rewards[:, 0])  # [N]
        returns = linear_recurrence(self._gamma * goes_on, rewards, after)  # [N, T]
        return columns | {RETURNS_TO_GO: returns}
