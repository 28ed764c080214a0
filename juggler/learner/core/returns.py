"""Estimates of returns: V-trace, GAE and n-step transitions.

All read rows of T steps that may hold several episodes, and treat their ends the same:

- Terminated: nothing follows the step, so its discount is 0.
- Truncated: the value of the episode's final observation replaces the rewards that would have
  followed. Nothing flows back from the next step, which belongs to another episode.
- The end of a row: like truncated, with the value of the row's last observation.
- A step that is not live (it only resets an environment, or pads a row) contributes nothing. Both
  its discount and its own correction are masked. With only the discount masked, 0 - V would flow
  back into the live steps before it.

V-trace: Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures", section 4.1. GAE: Schulman et al. 2016, "High-Dimensional Continuous
Control Using Generalized Advantage Estimation", section 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Columns
from juggler.learner.core.sequences import all_observations
from juggler.runtime.connectors.row_times import following, linear_recurrence
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map


class Estimates(NamedTuple):
    """Value targets and advantages; both are 0 at steps not live."""

    targets: Tensor  # [N, T] for the value function
    advantages: Tensor  # [N, T] for the policy gradient


def next_values(
    values: Tensor,
    last_values: Tensor,
    final_values: Tensor,
    final_rows: Tensor,
    final_steps: Tensor,
) -> Tensor:
    """Return V(x_{t+1}): the value of the observation after each step.

    Args:
        values: [N, T], values of the observation before each step.
        last_values: [N], values of the observation after each row.
        final_values: [K], values of the final observations of truncated episodes.
        final_rows: [K] int64, the rows of the truncations.
        final_steps: [K] int64, the steps of the truncations.

    Returns:
        [N, T]; arbitrary at steps that terminate an episode.
    """
    after = torch.cat([values[:, 1:], last_values.unsqueeze(1)], 1)  # [N, T]
    return after.index_put((final_rows, final_steps), final_values)  # [N, T]


def vtrace(
    *,
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    live: Tensor,
    gamma: float,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    rho_bar_pg: float = 1.0,
    c_bar: float = 1.0,
) -> Estimates:
    """Compute V-trace targets v_t and policy-gradient advantages.

    With importance weights w_t = π(a_t|x_t) / μ(a_t|x_t):

        ρ_t = min(ρ̄, w_t)    c_t = λ min(c̄, w_t)    γ_t = γ (1 - terminated_t)
        δ_t = ρ_t (r_t + γ_t V(x_{t+1}) - V(x_t))
        v_t = V(x_t) + δ_t + γ_t c_t (v_{t+1} - V(x_{t+1}))
        advantage_t = min(ρ̄_pg, w_t) (r_t + γ_t v_{t+1} - V(x_t))

    At the end of an episode or row, v_{t+1} is V(x_{t+1}).

    Args:
        log_ratios: log w_t, [N, T].
        rewards: [N, T]
        values: V(x_t), [N, T].
        next_values: V(x_{t+1}), [N, T], from `next_values`.
        terminated: [N, T] bool
        truncated: [N, T] bool
        live: [N, T] bool
    """
    ratios = log_ratios.exp()  # [N, T]
    discounts = gamma * (live & ~terminated).to(values.dtype)  # [N, T]
    errors = (rewards + discounts * next_values - values) * live  # [N, T] r + γ V' - V
    # The recurrence runs over x_t = v_t - V(x_t), which is 0 after the end of an episode or row.
    carried = discounts * ~truncated * lambda_ * ratios.clamp(max=c_bar)  # [N, T]
    corrections = linear_recurrence(
        carried, ratios.clamp(max=rho_bar) * errors, torch.zeros_like(rewards[:, 0])
    )  # [N, T]
    after = torch.cat([corrections[:, 1:], torch.zeros_like(corrections[:, :1])], 1)  # [N, T]
    # r + γ v' - V = (r + γ V' - V) + γ (v' - V')
    advantages = ratios.clamp(max=rho_bar_pg) * (errors + discounts * ~truncated * after)  # [N, T]
    return Estimates(targets=(values + corrections) * live, advantages=advantages)


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    live: Tensor,
    gamma: float,
    lambda_: float,
) -> Estimates:
    """Compute generalized advantage estimates, and the corresponding λ-returns.

        γ_t = γ (1 - terminated_t)
        δ_t = r_t + γ_t V(x_{t+1}) - V(x_t)
        A_t = δ_t + γ_t λ A_{t+1}, without the second term at the end of an episode or row
        target_t = A_t + V(x_t)

    Args:
        See `vtrace`.
    """
    discounts = gamma * (live & ~terminated).to(values.dtype)  # [N, T]
    errors = (rewards + discounts * next_values - values) * live  # [N, T]
    advantages = linear_recurrence(
        lambda_ * discounts * ~truncated, errors, torch.zeros_like(rewards[:, 0])
    )  # [N, T]
    return Estimates(targets=(advantages + values) * live, advantages=advantages)


#: A column of transitions [B, 1]: discount of the value of the observation after them.
DISCOUNTS = "discounts"


class Transitions(NamedTuple):
    """For each step, up to n steps of its episode and row."""

    rewards: Tensor  # [N, T] discounted sums
    discounts: Tensor  # [N, T] of the value of the observation after them; 0: terminated
    after: Tensor  # [N, T] int64, indices in `all_observations` of that observation
    last: Tensor  # [N, T] int64, indices in the flattened [N, T] of the last of these steps


def transitions(columns: Columns, n: int, gamma: float) -> Transitions:
    """Make n-step transitions, shorter at ends of episodes and rows.

    Args:
        columns: as `collate` makes them.
        n: maximum number of steps.
        gamma: discount of the reward one step later.
    """
    rewards, live = columns[c.REWARDS], columns[c.LIVE]  # [N, T]
    place = torch.arange(live.numel(), device=live.device).view(live.shape)  # [N, T]
    ends = columns[c.TERMINATED] | columns[c.TRUNCATED]  # [N, T]
    continues = live & ~ends  # [N, T] the next step in the row is of the same episode
    sums, discounts, last = rewards, torch.full_like(rewards, gamma), place  # [N, T]
    reaches = continues  # [N, T]
    for ahead in range(1, n):
        reaches = reaches & _ahead(live, ahead)  # [N, T] step t + ahead belongs to it
        sums = torch.where(reaches, sums + gamma**ahead * _ahead(rewards, ahead), sums)
        discounts = torch.where(reaches, gamma ** (ahead + 1), discounts)
        last = torch.where(reaches, place + ahead, last)
        reaches = reaches & _ahead(continues, ahead)
    ended = columns[c.TERMINATED].flatten()[last]  # [N, T]
    after = following(columns).flatten()[last]  # [N, T]
    return Transitions(sums, torch.where(ended, 0.0, discounts), after, last)


def terminated(columns: Columns) -> Tensor:
    """Mark live steps that terminate, in rows or transitions, bool [N, T]."""
    ends = columns[DISCOUNTS] == 0 if DISCOUNTS in columns else columns[c.TERMINATED]  # [N, T]
    found: Tensor = ends & columns[c.LIVE]  # [N, T]
    return found


def rows_of_transitions(columns: Columns, n: int, gamma: float) -> dict[str, Any]:
    """Convert transitions of M live steps to one-step rows for a table.

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
    """Shift rows [N, T] to a later step; 0 beyond the end."""
    return torch.cat([x[:, steps:], torch.zeros_like(x[:, :steps])], 1)  # [N, T]
