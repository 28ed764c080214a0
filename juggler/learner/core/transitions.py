"""Transitions: what each step of a sample led to, n steps later."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Columns
from juggler.learner.core.sequences import all_observations
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

#: A column of transitions [B, 1]: what the value of the observation after them counts.
DISCOUNTS = "discounts"


class Transitions(NamedTuple):
    """For each step of a sample, up to n steps of the same episode and row, from that one on."""

    rewards: Tensor  # [N, T] discounted sums
    discounts: Tensor  # [N, T] of the value of the observation after them; 0: it terminated
    after: Tensor  # [N, T] int64, indices in `all_observations` of that observation
    last: Tensor  # [N, T] int64, indices in the flattened [N, T] of the last of these steps


def transitions(columns: Columns, n: int, gamma: float) -> Transitions:
    """The n-step transitions of a sample, which are shorter at the end of an episode or a row.

    Args:
        columns: as `collate` makes them.
        n: the most steps.
        gamma: discount of the reward one step later.
    """
    rewards, live = columns[c.REWARDS], columns[c.LIVE]  # [N, T]
    place = torch.arange(live.numel(), device=live.device).view(live.shape)  # [N, T]
    over = columns[c.TERMINATED] | columns[c.TRUNCATED]  # [N, T]
    going_on = live & ~over  # [N, T] the next step is of the same episode, if it is in the row
    sums, discounts, last = rewards, torch.full_like(rewards, gamma), place  # [N, T]
    reaches = going_on  # [N, T]
    for ahead in range(1, n):
        reaches = reaches & _ahead(live, ahead)  # [N, T] step t + ahead belongs to it
        sums = torch.where(reaches, sums + gamma**ahead * _ahead(rewards, ahead), sums)
        discounts = torch.where(reaches, gamma ** (ahead + 1), discounts)
        last = torch.where(reaches, place + ahead, last)
        reaches = reaches & _ahead(going_on, ahead)
    ended = columns[c.TERMINATED].flatten()[last]  # [N, T]
    after = following(columns).flatten()[last]  # [N, T]
    return Transitions(sums, torch.where(ended, 0.0, discounts), after, last)


def following(columns: Columns) -> Tensor:
    """The indices in `all_observations` of the observation after each step [N, T], int64.

    Batches lack an episode's terminal observation; its index is then that of an arbitrary other
    one.
    """
    live = columns[c.LIVE]  # [N, T]
    rows, steps = live.shape
    inside = torch.arange(rows * steps, device=live.device).view(rows, steps)  # [N, T]
    behind = rows * steps + torch.arange(rows, device=live.device)  # [N]
    after = torch.cat([inside[:, 1:], behind.unsqueeze(1)], 1)  # [N, T]
    finals = rows * steps + rows + torch.arange(len(columns[c.FINAL_ROWS]), device=live.device)
    return after.index_put((columns[c.FINAL_ROWS], columns[c.FINAL_STEPS]), finals)


def terminated(columns: Columns) -> Tensor:
    """Which live steps end an episode for good [N, T], also of drawn transitions."""
    ends = columns[DISCOUNTS] == 0 if DISCOUNTS in columns else columns[c.TERMINATED]  # [N, T]
    found: Tensor = ends & columns[c.LIVE]  # [N, T]
    return found


def rows_of_transitions(columns: Columns, n: int, gamma: float) -> dict[str, Any]:
    """The transitions of M live steps as rows of one step each, for a table.

    Returns:
        observations and actions [M, 1, ...], rewards, discounts and live [M, 1], and
        last_observations [M, ...], the observations after them.
    """
    found = transitions(columns, n, gamma)
    live = columns[c.LIVE]  # [N, T]
    everything = all_observations(columns)  # [N T + N + K, ...]
    after = found.after[live]  # [M]
    of_live: dict[str, Any] = {
        key: tree_map(lambda x: x[live].unsqueeze(1), columns[key])
        for key in (c.OBSERVATIONS, c.ACTIONS, c.LIVE)
    }  # [M, 1, ...]
    return {
        **of_live,
        c.REWARDS: found.rewards[live].unsqueeze(1),  # [M, 1]
        DISCOUNTS: found.discounts[live].unsqueeze(1),  # [M, 1]
        c.LAST_OBSERVATIONS: tree_map(lambda x: x[after], everything),  # [M, ...]
    }


def _ahead(x: Tensor, steps: int) -> Tensor:
    """What is that many steps later in the row [N, T]; 0 or false behind its end."""
    return torch.cat([x[:, steps:], torch.zeros_like(x[:, :steps])], 1)  # [N, T]
