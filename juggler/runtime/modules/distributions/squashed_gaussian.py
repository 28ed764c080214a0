"""The distribution for Box with `squash`: real numbers between bounds."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import softplus

from juggler.runtime.modules.distributions.base import Constants
from juggler.runtime.modules.distributions.gaussian import DiagGaussian, GaussianSpec

# log(2 cosh u) = E|u + L| for a logistic L of scale 1/2. With these weights and deviations, a
# mixture of three normals approximates L: E|u + mixture| is within 4e-5 of it for every u.
_LOGISTIC = ((0.566071, 0.920594), (0.110642, 1.458137), (0.323287, 0.576346))


class Bounds(NamedTuple):
    """Bounds of the M elements of an action, [M] each. Elements without bounds have -1 and 1."""

    bounded: Tensor  # bool
    low: Tensor
    width: Tensor
    lowest: Tensor  # actions stay above: float32 resolves the distance to the bounds there
    highest: Tensor


class SquashedGaussian(DiagGaussian):
    """Independent normals u, squashed: an action is low + (high - low) · (1 + tanh u) / 2.

    Log-probabilities are those of actions, not of u. Very close to a bound, an action no longer
    determines its u. Actions therefore stay a few roundings away from the bounds, and
    log-probabilities beyond that distance are those at it, so they are always finite.

    `kl` is exact, because squashing both distributions alike changes nothing. `mode` is the
    squashed mean, which is the median. `entropy` has no closed form; the estimate is off by at most
    1e-4 nats per element of the action, for any mean and deviation, and has no noise.
    """

    def __init__(self, inputs: Tensor, action_shape: tuple[int, ...], bounds: Bounds) -> None:
        super().__init__(inputs, action_shape)
        self.bounds = bounds

    def log_prob(self, actions: Tensor) -> Tensor:
        bounded, low, width, lowest, highest = self.bounds
        flat = actions.reshape(self.mean.shape).to(self.mean.dtype)  # [..., M]
        inside = flat.clamp(lowest, highest)  # [..., M]
        # Computed from the distances to both bounds, atanh and log(1 - tanh²) stay accurate near
        # them.
        above_low = (inside - low).log()  # [..., M]
        below_high = (low + width - inside).log()  # [..., M]
        u = torch.where(bounded, 0.5 * (above_low - below_high), flat)  # [..., M]
        slope = above_low + below_high - (0.5 * width).log()  # [..., M] log |da/du|
        return super().log_prob(u) - torch.where(bounded, slope, 0.0).sum(-1)  # [...]

    def entropy(self) -> Tensor:
        bounded, _, width, _, _ = self.bounds
        std = self.log_std.exp()  # [..., M]
        log_2_cosh = torch.zeros_like(std)  # [..., M] the mean over u
        for weight, deviation in _LOGISTIC:
            spread = torch.hypot(std, torch.full_like(std, deviation))  # [..., M]
            log_2_cosh = log_2_cosh + weight * _mean_absolute(self.mean, spread)  # [..., M]
        # |da/du| = width / 2 · (1 - tanh² u), and 1 - tanh² u = 4 / (2 cosh u)².
        slope = (2 * width).log() - 2 * log_2_cosh  # [..., M] log |da/du|
        return super().entropy() + torch.where(bounded, slope, 0.0).sum(-1)  # [...]

    def mode(self) -> Tensor:
        return self._shaped(self._squash(self.mean))  # [..., *action shape]

    def sample(self, noise: Tensor) -> Tensor:
        u = torch.addcmul(self.mean, self.log_std.exp(), noise)  # [..., M]
        return self._shaped(self._squash(u))  # [..., *action shape]

    def sample_with_log_prob(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """By u itself, which close to a bound is more exact than by the action."""
        bounded, _, width, _, _ = self.bounds
        u = torch.addcmul(self.mean, self.log_std.exp(), noise)  # [..., M]
        log_2_cosh = u.abs() + softplus(-2 * u.abs())  # [..., M]
        slope = (2 * width).log() - 2 * log_2_cosh  # [..., M] log |da/du|
        log_probs = super().log_prob(u) - torch.where(bounded, slope, 0.0).sum(-1)  # [...]
        return self._shaped(self._squash(u)), log_probs

    def _squash(self, u: Tensor) -> Tensor:
        bounded, low, width, lowest, highest = self.bounds
        squashed = torch.addcmul(low, width, torch.sigmoid(2 * u))  # [..., M]
        return torch.where(bounded, squashed.clamp(lowest, highest), u)  # [..., M]


class SquashedGaussianSpec(GaussianSpec):
    """For a float `Box` with bounds, as in Haarnoja et al. 2018, "Soft Actor-Critic", appendix C.

    Like `GaussianSpec`, but actions stay between their finite bounds. An element is not squashed if
    a bound is infinite, or if the bounds are so close that float32 can hardly distinguish the
    actions between them.

    Args:
        low: lower bounds, in the shape of an action.
        high: upper bounds, likewise.
    """

    def __init__(self, low: ArrayLike, high: ArrayLike) -> None:
        super().__init__(np.shape(low))
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are handled below
            lows = np.asarray(low, np.float32).reshape(-1)  # [M]
            highs = np.asarray(high, np.float32).reshape(-1)  # [M]
            width = highs - lows  # [M]
            magnitude = np.maximum(np.abs(lows), np.abs(highs))  # [M]
            bounded = np.isfinite(width) & (width > magnitude * 2**-16)  # [M]
        one = np.float32(1)
        lows = np.where(bounded, lows, -one)  # [M]
        width = np.where(bounded, width, 2 * one)  # [M]
        margin = np.where(bounded, magnitude, one) * np.float32(2**-21)  # [M] >= four roundings
        self._constants = Constants(bounded, lows, width, lows + margin, lows + width - margin)

        #: What the bounds add to the entropy of actions, beside that of actions between -1 and 1.
        self.log_half_widths = float(np.log(width[bounded].astype(np.float64) / 2).sum())
        self.is_bounded = bool(bounded.all())

    def __call__(self, inputs: Tensor) -> SquashedGaussian:
        return SquashedGaussian(inputs, self.action_shape, self.bounds_on(inputs.device))

    def bounds_on(self, device: torch.device) -> Bounds:
        """The bounds of the elements, on a device."""
        return Bounds(*self._constants.on(device))


def _mean_absolute(mean: Tensor, std: Tensor) -> Tensor:
    """E|x| for normal x, elementwise."""
    z = mean / std
    peak = math.sqrt(2 / math.pi) * std * torch.exp(-0.5 * z.square())
    return peak + mean * torch.erf(z * math.sqrt(0.5))
