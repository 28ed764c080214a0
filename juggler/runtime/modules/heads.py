"""The policy's head: features to what an action distribution is made from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from juggler.runtime.modules.distributions import DistributionSpec
from juggler.runtime.modules.layers import initialized
from juggler.runtime.modules.model_config import ModelConfig


def policy_head(features: int, distribution: DistributionSpec, config: ModelConfig) -> nn.Module:
    """Features [..., F] -> "action_dist_inputs" [..., D], small ones at first.

    Args:
        features: F.
        distribution: for D, and for which of them are log standard deviations.
        config: for free_log_std and initializer.
    """
    free = distribution.log_std_inputs if config.free_log_std else []
    linear = nn.Linear(features, distribution.inputs_size - len(free))
    initialized(linear, config.initializer, gain=0.01)
    return FreeLogStd(linear, free) if free else linear


class FreeLogStd(nn.Module):
    """A head for all but the log standard deviations, which are the same in every state."""

    def __init__(self, others: nn.Linear, log_std_at: Sequence[int]) -> None:
        """Args:
        others: the head of the other outputs.
        log_std_at: where the log standard deviations are among all of them.
        """
        super().__init__()
        self.others = others
        self.log_std = nn.Parameter(torch.zeros(len(log_std_at)))  # [M]
        size = others.out_features + len(log_std_at)
        order = [i for i in range(size) if i not in log_std_at] + list(log_std_at)  # of [D]
        places = None if order == list(range(size)) else torch.tensor(order).argsort()  # [D]
        self.places: Tensor | None
        self.register_buffer("places", places)

    def forward(self, features: Tensor) -> Tensor:
        others = self.others(features)  # [..., D - M]
        log_std = self.log_std.expand(*others.shape[:-1], -1)  # [..., M]
        inputs = torch.cat([others, log_std], -1)  # [..., D]
        return inputs if self.places is None else inputs[..., self.places]
