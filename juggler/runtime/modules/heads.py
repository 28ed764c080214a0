"""The policy's head, which maps features to the inputs of an action distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from juggler.runtime.modules.distributions import DistributionSpec
from juggler.runtime.modules.layers import initialized
from juggler.runtime.modules.model_config import ModelConfig


def policy_head(features: int, distribution: DistributionSpec, config: ModelConfig) -> nn.Module:
    """Maps features [..., F] to "action_dist_inputs" [..., D], which are small at first.

    Args:
        features: F.
        distribution: determines D, and which inputs are log standard deviations.
        config: for free_log_std and initializer.
    """
    free = distribution.log_std_inputs if config.free_log_std else []
    linear = nn.Linear(features, distribution.inputs_size - len(free))
    initialized(linear, config.initializer, gain=0.01)
    return FreeLogStd(linear, free) if free else linear


class FreeLogStd(nn.Module):
    """A head for all inputs but the log standard deviations, which are parameters: the same in
    every state."""

    def __init__(self, others: nn.Linear, log_std_at: Sequence[int]) -> None:
        """
        Args:
            others: the head of the other inputs.
            log_std_at: positions of the log standard deviations among all inputs.
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
        log_std = self.log_std.expand(others.shape[:-1] + self.log_std.shape)  # [..., M]
        inputs = torch.cat([others, log_std], -1)  # [..., D]
        return inputs if self.places is None else inputs[..., self.places]
