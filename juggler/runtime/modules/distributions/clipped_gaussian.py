"""The distribution of a deterministic policy that explores: noise around its actions, clipped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from juggler.runtime.modules.distributions.base import ActionDistribution, same_kind
from juggler.runtime.modules.distributions.gaussian import LARGEST_LOG_STD
from juggler.runtime.modules.distributions.squashed_gaussian import (
    SquashedGaussian,
    SquashedGaussianSpec,
)

_TINY = torch.finfo(torch.float32).tiny
_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


class ClippedGaussian(SquashedGaussian):
    """Squashed means, to which independent normal noise is added; the sum is clipped to the bounds.

    An action is clip(m + s · noise) with m = low + (high - low) · (1 + tanh u) / 2, where u is the
    first half of the outputs. The second half is the logarithm of s in halves of the distance
    between the bounds. Each bound has a probability, because clipping makes actions that are equal
    to it: `log_prob` is the logarithm of that at a bound, and of the density elsewhere. `entropy`
    and `kl` are those of both together, and exact.

    Where s is infinite, an action is drawn uniformly between the bounds, whatever its mean is, so
    that gradients are zero there. `kl` is for finite s alone, and NaN for others.
    """

    @property
    def _centre(self) -> Tensor:
        return self._squash(self.mean)  # [..., M]

    @property
    def _scale(self) -> Tensor:
        return self._std * (0.5 * self.bounds.width)  # [..., M] in units of actions

    @property
    def _std(self) -> Tensor:
        """The noise in halves of the distance between the bounds [..., M], and 1 where actions are
        uniform: what is computed with infinity has no gradient, even where nobody uses it."""
        return torch.where(self._anywhere, 0.0, self.log_std).exp()

    def log_prob(self, actions: Tensor) -> Tensor:
        _, _, _, lowest, highest = self.bounds
        flat = actions.reshape(self.mean.shape).to(self.mean.dtype)  # [..., M]
        centre, scale = self._centre, self._scale  # [..., M]
        z = (flat - centre) / scale  # [..., M]
        inside = -0.5 * z.square() - scale.log() - _HALF_LOG_2_PI  # [..., M]
        below, above = self._chances()  # [..., M]
        at_low = torch.where(flat <= lowest, below.log(), inside)  # [..., M]
        around = torch.where(flat >= highest, above.log(), at_low)  # [..., M]
        return torch.where(self._anywhere, -self.bounds.width.log(), around).sum(-1)  # [...]

    def entropy(self) -> Tensor:
        below, above = self._chances()  # [..., M]
        within, _, second = self._moments()  # [..., M]
        at_bounds = below * below.log() + above * above.log()  # [..., M]
        between = within * (self._scale.log() + _HALF_LOG_2_PI) + 0.5 * second  # [..., M]
        around = between - at_bounds  # [..., M]
        return torch.where(self._anywhere, self.bounds.width.log(), around).sum(-1)  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        other = same_kind(self, other)
        at_bounds = torch.zeros_like(self.mean)  # [..., M]
        for own, theirs in zip(self._chances(), other._chances(), strict=True):
            at_bounds = at_bounds + own * (own.log() - theirs.log())  # [..., M]
        within, first, second = self._moments()  # [..., M]
        ratio = self._scale / other._scale  # [..., M]
        shift = (self._centre - other._centre) / other._scale  # [..., M]
        theirs = shift.square() * within + 2 * shift * ratio * first + ratio.square() * second
        between = 0.5 * (theirs - second) - within * ratio.log()  # [..., M]
        uniform = self._anywhere | other._anywhere  # [..., M]
        return torch.where(uniform, math.nan, at_bounds + between).sum(-1)  # [...]

    def sample(self, noise: Tensor) -> Tensor:
        _, low, width, lowest, highest = self.bounds
        around = self._moved(self._std * noise)  # [..., M]
        # What share of normal numbers is below one of them is uniform between 0 and 1.
        uniform = torch.addcmul(low, width, _below(noise)).clamp(lowest, highest)  # [..., M]
        return self._shaped(torch.where(self._anywhere, uniform, around))

    def sample_with_log_prob(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        actions = self.sample(noise)  # [..., *action shape]
        return actions, self.log_prob(actions)

    def moved(self, shares: Tensor) -> Tensor:
        """The most likely actions, moved by shares [..., M] of half the distance between the
        bounds, and clipped -> [..., *action shape]."""
        return self._shaped(self._moved(shares))

    def _moved(self, shares: Tensor) -> Tensor:
        """The same, flat [..., M]."""
        _, _, width, lowest, highest = self.bounds
        return torch.addcmul(self._centre, 0.5 * width, shares).clamp(lowest, highest)  # [..., M]

    @property
    def _anywhere(self) -> Tensor:
        """Which elements are drawn uniformly, bool [..., M]."""
        # Not those that are equal to infinity: ONNX Runtime clamps to what float32 can hold.
        return self.log_std > LARGEST_LOG_STD

    def _ends(self) -> tuple[Tensor, Tensor]:
        """The bounds, in deviations from the centre [..., M]."""
        _, _, _, lowest, highest = self.bounds
        return (lowest - self._centre) / self._scale, (highest - self._centre) / self._scale

    def _chances(self) -> tuple[Tensor, Tensor]:
        """Probabilities [..., M] of both bounds, which are never quite 0."""
        below, above = self._ends()
        return _below(below).clamp(min=_TINY), _below(-above).clamp(min=_TINY)

    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The integrals [..., M] of 1, z and z² over the normal density between the bounds."""
        below, above = self._ends()
        at_low, at_high = _density(below), _density(above)  # [..., M]
        within = (_below(above) - _below(below)).clamp(min=0)  # [..., M]
        return within, at_low - at_high, within + below * at_low - above * at_high


class ClippedGaussianSpec(SquashedGaussianSpec):
    """For a float `Box` whose elements all have finite bounds: M numbers that are squashed, then M
    logarithms of the noise, in halves of the distance between bounds; infinite: actions are
    uniform."""

    def why_not_finite(self, inputs: Tensor) -> str:
        known = inputs.clone()  # [2 M]
        known[self.noise_size :][inputs[self.noise_size :] > LARGEST_LOG_STD] = 0.0
        return super().why_not_finite(known)

    def __call__(self, inputs: Tensor) -> ClippedGaussian:
        return ClippedGaussian(inputs, self.action_shape, self.bounds_on(inputs.device))


def _below(z: Tensor) -> Tensor:
    """P(x < z) for standard normal x, elementwise."""
    return 0.5 * torch.erfc(z * -math.sqrt(0.5))


def _density(z: Tensor) -> Tensor:
    """The standard normal density, elementwise."""
    return torch.exp(-0.5 * z.square() - _HALF_LOG_2_PI)
