"""The distribution for Box: real numbers without bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from juggler.runtime.modules.distributions.base import (
    ActionDistribution,
    DistributionSpec,
    at_least_float32,
    empty_noise,
    one_uniform,
    same_kind,
)

_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)
# The exponential of slightly more is infinite in float32, and that of its negative nearly 0.
LARGEST_LOG_STD = 88.0


class DiagGaussian(ActionDistribution):
    """Independent normals: means and log standard deviations in one tensor [..., 2 M].

    If a log standard deviation is NaN or infinite, log-probabilities are not finite either.
    """

    def __init__(self, inputs: Tensor, action_shape: tuple[int, ...]) -> None:
        self.mean, self.log_std = at_least_float32(inputs).chunk(2, -1)  # [..., M] both
        self.action_shape = action_shape

    def log_prob(self, actions: Tensor) -> Tensor:
        flat = actions.reshape(self.mean.shape).to(self.mean.dtype)  # [..., M]
        z = (flat - self.mean) * torch.exp(-self.log_std)  # [..., M]
        return -(0.5 * z.square() + self.log_std + _HALF_LOG_2_PI).sum(-1)  # [...]

    def entropy(self) -> Tensor:
        return (self.log_std + (0.5 + _HALF_LOG_2_PI)).sum(-1)  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        other = same_kind(self, other)
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


class GaussianSpec(DistributionSpec):
    """For a float `Box` of any shape: M means, then M log standard deviations; normal noise.

    Actions are float32 and not bounded; a connector fits them to the environment's bounds.
    """

    def __init__(self, action_shape: tuple[int, ...]) -> None:
        size = math.prod(action_shape)
        super().__init__(inputs_size=2 * size, noise_size=size)
        self.action_shape = action_shape

    def __call__(self, inputs: Tensor) -> DiagGaussian:
        return DiagGaussian(inputs, self.action_shape)

    def zeros(self, leading_shape: Sequence[int]) -> Tensor:
        return torch.zeros((*leading_shape, *self.action_shape), dtype=torch.float32)

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        return empty_noise(leading_shape, self.noise_size, generator).normal_(generator=generator)

    def noise_from(self, uniform: Tensor) -> Tensor:
        # Box & Muller 1958, "A Note on the Generation of Random Normal Deviates".
        lengths = (-2 * one_uniform(uniform).log()).sqrt()  # [..., M]
        return lengths * torch.cos(2 * math.pi * uniform[..., 1, :])  # [..., M]

    @property
    def log_std_inputs(self) -> list[int]:
        return list(range(self.noise_size, self.inputs_size))

    def why_not_finite(self, inputs: Tensor) -> str:
        log_std = inputs[self.noise_size :]  # [M]
        bad = ~(log_std.abs() <= LARGEST_LOG_STD)  # [M] true for NaN as well
        if not bad.any():
            return super().why_not_finite(inputs)
        first = int(bad.int().argmax())
        return (
            f"the log standard deviation of element {first} of the action is "
            f"{log_std[first].item():g}: keep it within bounds in the module"
        )
