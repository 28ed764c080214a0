"""Action distributions: what a policy's outputs mean.

A `DistributionSpec` belongs to an action space: how many numbers a policy puts out for it, and how
to draw noise. An `ActionDistribution` belongs to the outputs of one forward pass. Sampling is a
function of outputs and noise, so that an envrunner can draw the noise of a whole fragment at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from juggler.runtime.modules.errors import UnsupportedSpace

_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


class ActionDistribution(ABC):
    """A distribution over actions for each of the leading dimensions of a policy's outputs.

    The leading dimensions (written [...] here) are any: [B], [N, T] or none.
    """

    @abstractmethod
    def log_prob(self, actions: Tensor) -> Tensor:
        """Log density (or mass) of actions [..., *action shape] -> [...]."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy in nats -> [...]."""

    @abstractmethod
    def kl(self, other: ActionDistribution) -> Tensor:
        """KL(self || other) in nats -> [...]; `other` must be of the same kind."""

    @abstractmethod
    def mode(self) -> Tensor:
        """The likeliest actions -> [..., *action shape]."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Actions as a function of noise [..., M] from the spec's `draw_noise`."""


@dataclass(frozen=True, kw_only=True)
class DistributionSpec(ABC):
    """How a policy's outputs become actions of one space.

    Attributes:
        inputs_size: D, numbers that a policy puts out for one observation.
        noise_size: M, numbers of noise that one action takes.
        action_shape: shape of one action.
        action_dtype: dtype of actions as sampled.
    """

    inputs_size: int
    noise_size: int
    action_shape: tuple[int, ...]
    action_dtype: torch.dtype

    @abstractmethod
    def __call__(self, inputs: Tensor) -> ActionDistribution:
        """The distribution that outputs [..., D] stand for."""

    @abstractmethod
    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        """Noise [*leading_shape, M] for `sample`, on the generator's device (none: the CPU)."""


class Categorical(ActionDistribution):
    """One of n actions `start`, …, `start + n - 1`, by unnormalised log probabilities [..., n]."""

    def __init__(self, logits: Tensor, start: int = 0) -> None:
        self.logits = logits  # [..., n]
        self.start = start

    @cached_property
    def log_probs(self) -> Tensor:
        """Of every action, normalised -> [..., n]."""
        return self.logits.log_softmax(-1)  # [..., n]

    def log_prob(self, actions: Tensor) -> Tensor:
        index = self._shift(actions.long(), -self.start).unsqueeze(-1)  # [..., 1]
        return self.log_probs.gather(-1, index).squeeze(-1)  # [...]

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum(-1)  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        if not isinstance(other, Categorical):
            raise TypeError(f"KL of a Categorical to a {type(other).__name__} is not defined")
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)  # [...]

    def mode(self) -> Tensor:
        return self._shift(self.logits.argmax(-1), self.start)  # [...]

    def sample(self, noise: Tensor) -> Tensor:
        return self._shift((self.logits + noise).argmax(-1), self.start)  # [...]

    def _shift(self, actions: Tensor, by: int) -> Tensor:
        return actions + by if by else actions


@dataclass(frozen=True, kw_only=True)
class CategoricalSpec(DistributionSpec):
    """For `Discrete(n, start)`: n logits; Gumbel noise."""

    start: int = 0

    def __call__(self, inputs: Tensor) -> Categorical:
        return Categorical(inputs, self.start)

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        # The largest of logits + Gumbel noise is a sample of their softmax; -log(-log(u)) is
        # Gumbel where u is uniform. (From torch's exponential_, it is four times slower.)
        noise = _empty(leading_shape, self.noise_size, generator)  # [..., n]
        return noise.uniform_(generator=generator).log_().neg_().log_().neg_()  # [..., n]


class DiagGaussian(ActionDistribution):
    """Independent normals: means and log standard deviations in one tensor [..., 2 M]."""

    def __init__(self, inputs: Tensor, action_shape: tuple[int, ...]) -> None:
        self.mean, self.log_std = inputs.chunk(2, -1)  # [..., M] both
        self.action_shape = action_shape

    def log_prob(self, actions: Tensor) -> Tensor:
        flat = actions.reshape(self.mean.shape).to(self.mean.dtype)  # [..., M]
        z = (flat - self.mean) * torch.exp(-self.log_std)  # [..., M]
        return -(0.5 * z.square() + self.log_std + _HALF_LOG_2_PI).sum(-1)  # [...]

    def entropy(self) -> Tensor:
        return (self.log_std + (0.5 + _HALF_LOG_2_PI)).sum(-1)  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        if not isinstance(other, DiagGaussian):
            raise TypeError(f"KL of a DiagGaussian to a {type(other).__name__} is not defined")
        log_ratio = other.log_std - self.log_std  # [..., M]
        z = (self.mean - other.mean) * torch.exp(-other.log_std)  # [..., M]
        return (log_ratio + 0.5 * (torch.exp(-2 * log_ratio) + z.square() - 1)).sum(-1)  # [...]

    def mode(self) -> Tensor:
        return self._shaped(self.mean)  # [..., *action shape]

    def sample(self, noise: Tensor) -> Tensor:
        actions = torch.addcmul(self.mean, self.log_std.exp(), noise)  # [..., M]
        return self._shaped(actions)  # [..., *action shape]

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(flat.shape[:-1] + self.action_shape)


@dataclass(frozen=True, kw_only=True)
class GaussianSpec(DistributionSpec):
    """For float `Box` of any shape: M means, then M log standard deviations; normal noise.

    Actions are float32 and not bounded: who steps the environment fits them to its bounds.
    """

    def __call__(self, inputs: Tensor) -> DiagGaussian:
        return DiagGaussian(inputs, self.action_shape)

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        return _empty(leading_shape, self.noise_size, generator).normal_(generator=generator)


def distribution_for(space: gymnasium.Space[Any]) -> DistributionSpec:
    """How a policy acts in an action space.

    Raises:
        UnsupportedSpace: there is no distribution for this space yet.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        n = int(space.n)
        return CategoricalSpec(
            inputs_size=n,
            noise_size=n,
            action_shape=(),
            action_dtype=torch.int64,
            start=int(space.start),
        )
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        size = math.prod(space.shape)
        if size == 0:
            raise UnsupportedSpace(f"action space {space} has no elements: nothing to choose")
        return GaussianSpec(
            inputs_size=2 * size,
            noise_size=size,
            action_shape=tuple(space.shape),
            action_dtype=torch.float32,
        )
    raise UnsupportedSpace(
        f"no action distribution for {space}: served today are Discrete and Box of a float dtype"
    )


def _empty(leading_shape: Sequence[int], size: int, generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else torch.device("cpu")
    return torch.empty((*leading_shape, size), dtype=torch.float32, device=device)
