"""The distribution for Discrete: one of several actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from juggler.runtime.modules.distributions.base import (
    ActionDistribution,
    DistributionSpec,
    at_least_float32,
    mask_logits,
    one_uniform,
    same_kind,
    uniform_noise,
)


class Categorical(ActionDistribution):
    """One of the n actions `start`, …, `start + n - 1`, for unnormalised log-probabilities [...,
    n]."""

    def __init__(self, logits: Tensor, start: int = 0) -> None:
        self.logits = logits  # [..., n]
        self.start = start

    @cached_property
    def log_probs(self) -> Tensor:
        """Normalised log-probabilities of every action -> [..., n]."""
        return at_least_float32(self.logits).log_softmax(-1)  # [..., n]

    @cached_property
    def probs(self) -> Tensor:
        """The probability of each action -> [..., n]."""
        # On a CPU, exp of log-probabilities takes ten times as long if some actions are illegal.
        return at_least_float32(self.logits).softmax(-1)  # [..., n]

    def log_prob(self, actions: Tensor) -> Tensor:
        index = self._shift(actions.long(), -self.start).unsqueeze(-1)  # [..., 1]
        return self.log_probs.gather(-1, index).squeeze(-1)  # [...]

    def entropy(self) -> Tensor:
        return -(self.probs * self.log_probs).sum(-1)  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        other = same_kind(self, other)
        return (self.probs * (self.log_probs - other.log_probs)).sum(-1)  # [...]

    def mode(self) -> Tensor:
        return self._shift(self.logits.argmax(-1), self.start)  # [...]

    def sample(self, noise: Tensor) -> Tensor:
        return self._shift((self.logits + noise).argmax(-1), self.start)  # [...]

    def _shift(self, actions: Tensor, by: int) -> Tensor:
        return actions + by if by else actions


class CategoricalSpec(DistributionSpec):
    """For `Discrete(n, start)`: n logits; Gumbel noise; masks [..., n]."""

    def __init__(self, n: int, start: int = 0) -> None:
        super().__init__(inputs_size=n, noise_size=n)
        self.start = start

    def __call__(self, inputs: Tensor) -> Categorical:
        return Categorical(inputs, self.start)

    def zeros(self, leading_shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(leading_shape), dtype=torch.int64)  # [...]

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        return gumbel_noise(leading_shape, self.noise_size, generator)  # [..., n]

    def noise_from(self, uniform: Tensor) -> Tensor:
        return gumbel_from(uniform)  # [..., n]

    def mask(self, inputs: Tensor, mask: Any) -> Tensor:
        return mask_logits(inputs, mask, f"the {self.inputs_size} actions")  # [..., n]


def gumbel_noise(
    leading_shape: Sequence[int], size: int, generator: torch.Generator | None
) -> Tensor:
    """Gumbel noise [*leading_shape, size]: the argmax of logits plus noise is distributed as their
    softmax.

    The noise is finite, between -4.5 and 17.
    """
    # -log(-log(u)) is Gumbel noise if u is uniform. (torch's exponential_ takes four times as
    # long.)
    noise = uniform_noise(leading_shape, size, generator)  # [..., size]
    return noise.log_().neg_().log_().neg_()  # [..., size]


def gumbel_from(uniform: Tensor) -> Tensor:
    """The same noise from uniform numbers [..., 2, size] -> [..., size]."""
    return -(-one_uniform(uniform).log()).log()  # [..., size]
