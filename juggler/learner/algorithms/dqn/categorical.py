"""C51: Bellemare et al. 2017, "A Distributional Perspective on Reinforcement Learning".

A network with `atoms` estimates the probabilities p_j(x, a) of K returns z_j, at equal distances Δ
from `v_min` to `v_max`. The value of an action is their mean. What follows n steps later has the
returns r + γ^n z_i, with the target network's probabilities. Each is clipped to the limits, and its
probability shared between the two z_j on either side of it, the more the nearer:

    m_j = Σ_i p'_i max(0, 1 - |clip(r + γ^n z_i) - z_j| / Δ)

The loss is the cross-entropy -Σ_j m_j log p_j. It differs from the divergence KL(m || p) by the
entropy of m alone, which no parameter changes. The divergence is the priority, since it is 0 where
nothing is left to learn (Hessel et al. 2018, "Rainbow").
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Divergence(NamedTuple):
    """How far probabilities are from those that they are to become."""

    cross_entropy: Tensor  # [B]
    kl: Tensor  # [B], without a gradient


def projected(probabilities: Tensor, rewards: Tensor, discounts: Tensor, returns: Tensor) -> Tensor:
    """m: the probabilities [B, K] of the returns, a discount and a reward before those given.

    Args:
        probabilities: p', [B, K].
        rewards: [B]
        discounts: [B]; 0 where nothing follows.
        returns: z, [K], at equal distances.
    """
    low, high = returns[0], returns[-1]  # [] each
    moved = rewards.unsqueeze(1) + discounts.unsqueeze(1) * returns  # [B, K]
    moved = torch.minimum(torch.maximum(moved, low), high)  # [B, K]
    distances = (moved.unsqueeze(2) - returns).abs() / (returns[1] - low)  # [B, K, K] i, j
    shares = (1 - distances).clamp(min=0)  # [B, K, K]
    return (probabilities.unsqueeze(2) * shares).sum(1)  # [B, K]


def divergence(logits: Tensor, targets: Tensor) -> Divergence:
    """Of the probabilities with these logits [B, K] from targets [B, K]."""
    cross_entropy = -(targets * logits.log_softmax(-1)).sum(-1)  # [B]
    entropy = -torch.xlogy(targets, targets).sum(-1)  # [B]
    return Divergence(cross_entropy, cross_entropy.detach() - entropy)
