"""The interfaces of action distributions and their specs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

#: A tensor of actions; for Dict and Tuple spaces a map of tensors by key ("0", "1", … for a Tuple).
Actions: TypeAlias = Any

D = TypeVar("D", bound="ActionDistribution")


class ActionDistribution(ABC):
    """A distribution over actions, for each element of the leading dimensions of a policy's
    outputs.

    The leading dimensions, written [...] here, may be any: [B], [N, T] or none.
    """

    @abstractmethod
    def log_prob(self, actions: Actions) -> Tensor:
        """Log density (or mass) of actions [..., *action shape] -> [...]."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy in nats -> [...]."""

    @abstractmethod
    def kl(self, other: ActionDistribution) -> Tensor:
        """KL(self || other) in nats -> [...]; `other` must be of the same kind."""

    @abstractmethod
    def mode(self) -> Actions:
        """The most likely actions -> [..., *action shape], for acting without exploration.

        If they are hard to compute, the centre of the distribution.
        """

    @abstractmethod
    def sample(self, noise: Tensor) -> Actions:
        """Draws actions as a function of noise [..., M] from the spec's `draw_noise`."""

    def sample_with_log_prob(self, noise: Tensor) -> tuple[Actions, Tensor]:
        """The same, and the log density (or mass) [...] of the actions. For numbers, gradients
        reach the policy's outputs through both."""
        actions = self.sample(noise)
        return actions, self.log_prob(actions)


class DistributionSpec(ABC):
    """How a policy's outputs become actions of one space.

    To make your own distribution, derive from the two classes in this file. This one is for a Box
    without bounds, with heavier tails than a Gaussian's:

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

            def zeros(self, leading_shape):
                return torch.zeros(*leading_shape, self.noise_size)


        def laplace(action_space):
            size = action_space.shape[0]
            return LaplaceSpec(inputs_size=2 * size, noise_size=size)

    A run takes it as distribution = "package.module:laplace".

    Args:
        inputs_size: D, the number of a policy's outputs for one observation.
        noise_size: M, the number of random numbers that one action takes.
    """

    def __init__(self, inputs_size: int, noise_size: int) -> None:
        self.inputs_size = inputs_size
        self.noise_size = noise_size

    @abstractmethod
    def __call__(self, inputs: Tensor) -> ActionDistribution:
        """The distribution with these inputs [..., D]."""

    @abstractmethod
    def zeros(self, leading_shape: Sequence[int]) -> Actions:
        """Zeros [*leading_shape, *action shape] with the shapes and dtypes of sampled actions.

        They are memory to write actions into; 0 need not be an action of the space.
        """

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        """Noise [*leading_shape, M] for `sample`, on the generator's device (None: the CPU).

        Uniform between 0 and 1, both excluded, unless a subclass overrides this.
        """
        return uniform_noise(leading_shape, self.noise_size, generator)  # [..., M]

    def noise_from(self, uniform: Tensor) -> Tensor:
        """The same noise from given random numbers, with operations that can be exported.

        Args:
            uniform: [..., 2, M] between 0 and 1; a subclass uses one or both of each pair.

        Raises:
            NotImplementedError: the subclass overrides `draw_noise`, but not this method.
        """
        if type(self).draw_noise is not DistributionSpec.draw_noise:
            raise NotImplementedError(
                f"{type(self).__name__} has a draw_noise of its own: it needs a noise_from, too"
            )
        return one_uniform(uniform)  # [..., M]

    def mask(self, inputs: Tensor, mask: Any) -> Tensor:
        """Outputs [..., D] that give illegal actions no probability.

        Args:
            inputs: a policy's outputs [..., D].
            mask: 1 (or true) for legal actions, in this space's layout.

        Raises:
            ValueError: the mask has another layout.
        """
        raise ValueError(f"{type(self).__name__} takes no action mask: leave it out")

    @property
    def log_std_inputs(self) -> list[int]:
        """Positions of the log standard deviations among the D outputs. A policy may learn them as
        parameters, the same in every state."""
        return []

    def why_not_finite(self, inputs: Tensor) -> str:
        """Explains which of the outputs [D] for one observation makes log-probabilities that are
        not finite. Empty: none does by itself."""
        bad = [(i, x) for i, x in enumerate(inputs.tolist()) if not math.isfinite(x)]
        return f"output {bad[0][0]} of the policy is {bad[0][1]:g}" if bad else ""


#: The smallest normal number in float32.
_TINY = torch.finfo(torch.float32).tiny
#: The largest number below 1 in float32.
_BELOW_ONE = 1 - 2.0**-24


def empty_noise(
    leading_shape: Sequence[int], size: int, generator: torch.Generator | None
) -> Tensor:
    """Uninitialized memory for noise [*leading_shape, size] on the generator's device."""
    device = generator.device if generator is not None else torch.device("cpu")
    return torch.empty((*leading_shape, size), dtype=torch.float32, device=device)


def uniform_noise(
    leading_shape: Sequence[int], size: int, generator: torch.Generator | None
) -> Tensor:
    """Uniform numbers [*leading_shape, size] between 0 and 1, both excluded."""
    noise = empty_noise(leading_shape, size, generator)  # [..., size]
    # With bounds of 0 and 1, one number in 16 million would be 0.
    return noise.uniform_(_TINY, 1, generator=generator)  # [..., size]


def one_uniform(uniform: Tensor) -> Tensor:
    """The first of each pair of numbers [..., 2, M], clamped to exclude 0 and 1 -> [..., M]."""
    return uniform[..., 0, :].clamp(_TINY, _BELOW_ONE)  # [..., M]


def at_least_float32(inputs: Tensor) -> Tensor:
    """The inputs in float32 or better. Half precision is enough for a policy's outputs, but not for
    sums of logarithms."""
    return inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs


def illegal_logit(dtype: torch.dtype) -> float:
    """A logit so small that its option gets no probability at all in float32.

    It is finite, and so far from the largest float32 that its product with a gradient is finite
    too. With infinity, 0 · ∞ would be NaN in entropies and gradients.
    """
    return max(-1e18, torch.finfo(dtype).min)


def mask_logits(inputs: Tensor, mask: Any, options: str) -> Tensor:
    """Logits [..., D], replaced by `illegal_logit` where the mask [..., D] is 0.

    Args:
        inputs: logits.
        mask: of any dtype.
        options: what the logits are for, for the error.

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
    """`other`, if the KL divergence from one to the other is defined.

    Raises:
        TypeError: it is not defined.
    """
    if type(other) is not type(one):
        raise TypeError(f"KL of a {type(one).__name__} to a {type(other).__name__} is not defined")
    return other


class Constants:
    """Arrays of a spec, as tensors on every device that has asked for them."""

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self._arrays = arrays
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors, copied there once."""
        if device not in self._on:
            # The first call may be made while acting, in inference mode, and tensors made in that
            # mode cannot be used for training.
            with torch.inference_mode(False):
                tensors = tuple(torch.from_numpy(array).to(device) for array in self._arrays)
            self._on[device] = tensors
        return self._on[device]
