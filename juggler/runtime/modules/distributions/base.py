"""Interfaces of action distributions, and distributions of numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import softplus

#: A tensor of actions; for Dict and Tuple spaces a map of tensors by key ("0", "1", … for a Tuple).
Actions: TypeAlias = Any

D = TypeVar("D", bound="ActionDistribution")


class ActionDistribution(ABC):
    """Distributions over actions, one per policy output [..., D].

    The leading dimensions, written [...], may be any: [B], [N, T] or none.
    """

    @abstractmethod
    def log_prob(self, actions: Actions) -> Tensor:
        """Return the log density (or mass) [...] of actions [..., *action shape]."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the entropy [...] in nats."""

    @abstractmethod
    def kl(self, other: ActionDistribution) -> Tensor:
        """Return KL(self || other) [...] in nats.

        `other` must be of the same kind.
        """

    @abstractmethod
    def mode(self) -> Actions:
        """Return the most likely actions [..., *action shape].

        For acting without exploration. If they are hard to compute, returns the centre of the
        distribution.
        """

    @abstractmethod
    def sample(self, noise: Tensor) -> Actions:
        """Map noise [..., M] from the spec's `draw_noise` to actions."""

    def sample_with_log_prob(self, noise: Tensor) -> tuple[Actions, Tensor]:
        """Sample actions with their log density or mass [...].

        For numbers, gradients reach the policy's outputs through both.
        """
        actions = self.sample(noise)
        return actions, self.log_prob(actions)


class DistributionSpec(ABC):
    """Maps a policy's outputs to distributions over one action space.

    To make your own distribution, derive from the two classes in this file. This example is for a
    Box without bounds, with heavier tails than a Gaussian's:

        class Laplace(ActionDistribution):
            def __init__(self, inputs):
                location, log_scale = inputs.chunk(2, -1)  # [..., M] both
                self.each = torch.distributions.Laplace(location, log_scale.exp())

            def log_prob(self, actions):
                return self.each.log_prob(actions).sum(-1)

            def entropy(self):
                return self.each.entropy().sum(-1)

            def kl(self, other):
                return torch.distributions.kl_divergence(self.each, other.each).sum(-1)

            def mode(self):
                return self.each.mode

            def sample(self, noise):
                return self.each.icdf(noise)


        class LaplaceSpec(DistributionSpec):
            def __call__(self, inputs):
                return Laplace(inputs)


        def laplace(action_space):
            size = action_space.shape[0]
            return LaplaceSpec(inputs_size=2 * size, noise_size=size)

    A run uses it with distribution = "package.module:laplace".

    Args:
        inputs_size: D, the number of a policy's outputs for one observation.
        noise_size: M, the number of random numbers for one action.
    """

    def __init__(self, inputs_size: int, noise_size: int) -> None:
        self.inputs_size = inputs_size
        self.noise_size = noise_size

    @abstractmethod
    def __call__(self, inputs: Tensor) -> ActionDistribution:
        """Return the distribution with these inputs [..., D]."""

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw noise [*leading_shape, M] for `sample`, on the generator's device.

        Uniform between 0 and 1, both excluded, unless a subclass overrides this.
        """
        noise = empty_noise(leading_shape, self.noise_size, generator)  # [..., M]
        # With bounds of 0 and 1, one number in 16 million would be 0.
        return noise.uniform_(_TINY, 1, generator=generator)  # [..., M]

    def noise_from(self, uniform: Tensor) -> Tensor:
        """Map uniform numbers to noise, by exportable operations.

        Args:
            uniform: [..., 2, M] between 0 and 1; a subclass uses one or both of each pair.

        Raises:
            NotImplementedError: the subclass overrides `draw_noise`, but not this method.
        """
        if type(self).draw_noise is not DistributionSpec.draw_noise:
            raise NotImplementedError(
                f"{type(self).__name__} has its own draw_noise: it also needs a noise_from"
            )
        return one_uniform(uniform)  # [..., M]

    def mask(self, inputs: Tensor, mask: Any) -> Tensor:
        """Return outputs [..., D] that give illegal actions no probability.

        Args:
            inputs: a policy's outputs [..., D].
            mask: 1 (or true) for legal actions, in this space's layout.

        Raises:
            ValueError: the mask has another layout.
        """
        raise ValueError(f"{type(self).__name__} has no action mask: leave it out")

    @property
    def log_std_inputs(self) -> list[int]:
        """Positions of log standard deviations among the D outputs.

        A policy may learn these as parameters, equal in every state.
        """
        return []

    def why_not_finite(self, inputs: Tensor) -> str:
        """Explain which output of [D] makes log-probabilities non-finite, or ""."""
        bad = [(i, x) for i, x in enumerate(inputs.tolist()) if not math.isfinite(x)]
        return f"output {bad[0][0]} of the policy is {bad[0][1]:g}" if bad else ""


#: The smallest normal number in float32.
_TINY = torch.finfo(torch.float32).tiny
#: The largest number below 1 in float32.
_BELOW_ONE = 1 - 2.0**-24


def empty_noise(
    leading_shape: Sequence[int], size: int, generator: torch.Generator | None
) -> Tensor:
    """Return uninitialized memory for noise [*leading_shape, size]."""
    device = generator.device if generator is not None else torch.device("cpu")
    return torch.empty((*leading_shape, size), dtype=torch.float32, device=device)


def one_uniform(uniform: Tensor) -> Tensor:
    """Return the first of pairs [..., 2, M], clamped into (0, 1)."""
    return uniform[..., 0, :].clamp(_TINY, _BELOW_ONE)  # [..., M]


def at_least_float32(inputs: Tensor) -> Tensor:
    """Convert inputs to float32 or better, as sums of logarithms need."""
    return inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs


def illegal_logit(dtype: torch.dtype) -> float:
    """Return a logit that underflows to probability 0 in float32.

    It is finite, and far enough from the largest float32 that its product with a gradient is also
    finite. With infinity, 0 · ∞ would be NaN in entropies and gradients.
    """
    return max(-1e18, torch.finfo(dtype).min)


def mask_logits(inputs: Tensor, mask: Any, options: str) -> Tensor:
    """Replace logits [..., D] by `illegal_logit` at mask zeros.

    Args:
        inputs: logits.
        mask: of any dtype.
        options: the options of the logits, for the error.

    Raises:
        ValueError: the mask is not a tensor, or has another shape.
    """
    if not isinstance(mask, Tensor) or mask.shape != inputs.shape:
        what = list(mask.shape) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(
            f"the action mask is {what}, not {list(inputs.shape)}: its last dimension must have "
            f"one number, 0 or 1, for each of {options}"
        )
    legal = mask if mask.dtype == torch.bool else mask != 0  # [..., D]
    return torch.where(legal, inputs, illegal_logit(inputs.dtype))  # [..., D]


def same_kind(one: D, other: ActionDistribution) -> D:
    """Return `other`, if a KL divergence to it is defined.

    Raises:
        TypeError: it is not defined.
    """
    if type(other) is not type(one):
        raise TypeError(f"KL of a {type(one).__name__} to a {type(other).__name__} is not defined")
    return other


class Constants:
    """Arrays of a spec, cached as tensors per device."""

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self._arrays = arrays
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors, copied to the device once."""
        if device not in self._on:
            # The first call may be in inference mode, whose tensors cannot be used for training.
            with torch.inference_mode(False):
                tensors = tuple(torch.from_numpy(array).to(device) for array in self._arrays)
            self._on[device] = tensors
        return self._on[device]


_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)
# The exponential of slightly more is infinite in float32, and of its negative nearly 0.
LARGEST_LOG_STD = 88.0


class DiagGaussian(ActionDistribution):
    """Independent normals: means, then log standard deviations, [..., 2 M].

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
    """Unbounded actions for a float `Box`: M means, M log deviations.

    Actions are float32 and not bounded; a connector fits them to the environment's bounds.
    """

    def __init__(self, action_shape: tuple[int, ...]) -> None:
        size = math.prod(action_shape)
        super().__init__(inputs_size=2 * size, noise_size=size)
        self.action_shape = action_shape

    def __call__(self, inputs: Tensor) -> DiagGaussian:
        return DiagGaussian(inputs, self.action_shape)

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


# log(2 cosh u) = E|u + L| for a logistic L of scale 1/2. With these weights and deviations, a
# mixture of three normals approximates L: E|u + mixture| is within 4e-5 of it for every u.
_LOGISTIC = ((0.566071, 0.920594), (0.110642, 1.458137), (0.323287, 0.576346))


class Bounds(NamedTuple):
    """Bounds [M] of an action's elements; -1 and 1 if unbounded."""

    bounded: Tensor  # bool
    low: Tensor
    width: Tensor
    lowest: Tensor  # actions stay above it, where float32 resolves the distance to the bounds
    highest: Tensor


class SquashedGaussian(DiagGaussian):
    """Independent normals u, squashed by tanh to bounds.

    An action is low + (high - low) · (1 + tanh u) / 2. Log-probabilities are of actions, not of u.
    Very close to a bound, an action no longer determines its u. Actions therefore stay a few
    roundings away from the bounds, and log-probabilities beyond that distance are clamped, so they
    are always finite.

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
        """Compute it by u, more exact near a bound."""
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
    """Bounded actions for a float `Box`, squashed by tanh.

    As in Haarnoja et al. 2018, "Soft Actor-Critic", appendix C. An element is not squashed if a
    bound is infinite, or if float32 can hardly distinguish the actions between the bounds.

    Args:
        low: lower bounds, in the shape of an action.
        high: upper bounds, in the shape of an action.
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

        #: Entropy that the bounds add to that between -1 and 1.
        self.log_half_widths = float(np.log(width[bounded].astype(np.float64) / 2).sum())
        self.is_bounded = bool(bounded.all())

    def __call__(self, inputs: Tensor) -> SquashedGaussian:
        return SquashedGaussian(inputs, self.action_shape, self.bounds_on(inputs.device))

    def bounds_on(self, device: torch.device) -> Bounds:
        """Return the bounds of the elements, on a device."""
        return Bounds(*self._constants.on(device))


def _mean_absolute(mean: Tensor, std: Tensor) -> Tensor:
    """Return E|x| for normal x, elementwise."""
    z = mean / std
    peak = math.sqrt(2 / math.pi) * std * torch.exp(-0.5 * z.square())
    return peak + mean * torch.erf(z * math.sqrt(0.5))


class ClippedGaussian(SquashedGaussian):
    """Squashed means plus normal noise, clipped to the bounds.

    An action is clip(m + s · noise) with m = low + (high - low) · (1 + tanh u) / 2, where u is the
    first half of the outputs. The second half is the logarithm of s in halves of the distance
    between the bounds. Each bound has a probability, because clipping makes actions equal to it:
    `log_prob` is the logarithm of this probability at a bound, and of the density elsewhere. No
    algorithm with this distribution needs its entropy or divergence.

    If s is infinite, an action is drawn uniformly between the bounds for any mean, so gradients
    are zero.
    """

    @property
    def _centre(self) -> Tensor:
        return self._squash(self.mean)  # [..., M]

    @property
    def _scale(self) -> Tensor:
        return self._std * (0.5 * self.bounds.width)  # [..., M] in units of actions

    @property
    def _std(self) -> Tensor:
        """Relative noise [..., M], 1 for uniform actions.

        Gradients of infinity would be NaN, even if unused.
        """
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
        raise NotImplementedError("a clipped Gaussian has no entropy here")

    def kl(self, other: ActionDistribution) -> Tensor:
        raise NotImplementedError("a clipped Gaussian has no KL divergence here")

    def sample(self, noise: Tensor) -> Tensor:
        _, low, width, lowest, highest = self.bounds
        around = self._moved(self._std * noise)  # [..., M]
        # The normal distribution function of a normal number is uniform between 0 and 1.
        uniform = torch.addcmul(low, width, _below(noise)).clamp(lowest, highest)  # [..., M]
        return self._shaped(torch.where(self._anywhere, uniform, around))

    def sample_with_log_prob(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        actions = self.sample(noise)  # [..., *action shape]
        return actions, self.log_prob(actions)

    def moved(self, shares: Tensor) -> Tensor:
        """Return modes shifted by shares [..., M] of half the range, clipped."""
        return self._shaped(self._moved(shares))

    def _moved(self, shares: Tensor) -> Tensor:
        """`moved`, flattened to [..., M]."""
        _, _, width, lowest, highest = self.bounds
        return torch.addcmul(self._centre, 0.5 * width, shares).clamp(lowest, highest)  # [..., M]

    @property
    def _anywhere(self) -> Tensor:
        """Mask of elements that are drawn uniformly, bool [..., M]."""
        # Not equality with infinity: ONNX Runtime clamps to the range of float32.
        return self.log_std > LARGEST_LOG_STD

    def _chances(self) -> tuple[Tensor, Tensor]:
        """Return probabilities [..., M] of both bounds, which are never exactly 0."""
        _, _, _, lowest, highest = self.bounds
        below = _below((lowest - self._centre) / self._scale).clamp(min=_TINY)  # [..., M]
        return below, _below((self._centre - highest) / self._scale).clamp(min=_TINY)


class ClippedGaussianSpec(SquashedGaussianSpec):
    """Bounded actions with clipped noise, for a `Box` with finite bounds.

    The inputs are M numbers to squash, then M logarithms of the noise, in halves of the distance
    between bounds; infinite: actions are uniform.
    """

    def why_not_finite(self, inputs: Tensor) -> str:
        known = inputs.clone()  # [2 M]
        known[self.noise_size :][inputs[self.noise_size :] > LARGEST_LOG_STD] = 0.0
        return super().why_not_finite(known)

    def __call__(self, inputs: Tensor) -> ClippedGaussian:
        return ClippedGaussian(inputs, self.action_shape, self.bounds_on(inputs.device))


def _below(z: Tensor) -> Tensor:
    """Return P(x < z) for standard normal x, elementwise."""
    return 0.5 * torch.erfc(z * -math.sqrt(0.5))
