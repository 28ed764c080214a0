"""What every action distribution can do, and what its action space's part in it is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

#: A tensor of actions; for Dict and Tuple spaces a map of such by key ("0", "1", … for a Tuple).
Actions: TypeAlias = Any

D = TypeVar("D", bound="ActionDistribution")


class ActionDistribution(ABC):
    """A distribution over actions for each of the leading dimensions of a policy's outputs.

    The leading dimensions (written [...] here) are any: [B], [N, T] or none.
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
        """What to do where nothing is to be tried: the likeliest actions -> [..., *action shape].

        Where those are hard to find, the centre of the distribution.
        """

    @abstractmethod
    def sample(self, noise: Tensor) -> Actions:
        """Actions as a function of noise [..., M] from the spec's `draw_noise`."""


class DistributionSpec(ABC):
    """How a policy's outputs become actions of one space.

    A distribution of your own is a subclass of each of the two classes here. For a Box without
    bounds, with tails heavier than a Gaussian's:

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
        inputs_size: D, numbers that a policy puts out for one observation.
        noise_size: M, numbers of noise that one action takes.
    """

    def __init__(self, inputs_size: int, noise_size: int) -> None:
        self.inputs_size = inputs_size
        self.noise_size = noise_size

    @abstractmethod
    def __call__(self, inputs: Tensor) -> ActionDistribution:
        """The distribution that outputs [..., D] stand for."""

    @abstractmethod
    def zeros(self, leading_shape: Sequence[int]) -> Actions:
        """Zeros [*leading_shape, *action shape] in the shapes and dtypes of sampled actions.

        Memory to write actions into: 0 need not be an action of the space.
        """

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        """Noise [*leading_shape, M] for `sample`, on the generator's device (none: the CPU).

        Uniform between 0 and 1, both excluded, unless a subclass says otherwise.
        """
        return uniform_noise(leading_shape, self.noise_size, generator)  # [..., M]

    def noise_from(self, uniform: Tensor) -> Tensor:
        """The same noise of somebody else's random numbers, in operations that can be exported.

        Args:
            uniform: [..., 2, M] between 0 and 1; a subclass uses one or both of each two.

        Raises:
            NotImplementedError: the subclass draws noise of its own and has no other way.
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
            mask: 1 (or true) where an action is legal, in this space's layout.

        Raises:
            ValueError: the mask is not laid out as it must be.
        """
        raise ValueError(f"{type(self).__name__} takes no action mask: leave it out")

    @property
    def log_std_inputs(self) -> list[int]:
        """Which of the D outputs are log standard deviations: a policy may learn those as
        parameters, the same in every state."""
        return []

    def why_not_finite(self, inputs: Tensor) -> str:
        """For people: which of the outputs [D] for one observation makes log-probabilities that
        are not finite. Empty: none does by itself."""
        bad = [(i, x) for i, x in enumerate(inputs.tolist()) if not math.isfinite(x)]
        return f"output {bad[0][0]} of the policy is {bad[0][1]:g}" if bad else ""


#: The smallest normal number of float32.
_TINY = torch.finfo(torch.float32).tiny
#: The largest below 1.
_BELOW_ONE = 1 - 2.0**-24


def empty_noise(
    leading_shape: Sequence[int], size: int, generator: torch.Generator | None
) -> Tensor:
    """Memory for noise [*leading_shape, size] on the generator's device."""
    device = generator.device if generator is not None else torch.device("cpu")
    return torch.empty((*leading_shape, size), dtype=torch.float32, device=device)


def uniform_noise(
    leading_shape: Sequence[int], size: int, generator: torch.Generator | None
) -> Tensor:
    """Numbers [*leading_shape, size] between 0 and 1, both excluded."""
    noise = empty_noise(leading_shape, size, generator)  # [..., size]
    # Bounds of 0 and 1 would include 0, once in 16 million.
    return noise.uniform_(_TINY, 1, generator=generator)  # [..., size]


def one_uniform(uniform: Tensor) -> Tensor:
    """The first of each two numbers [..., 2, M] between 0 and 1, which are excluded -> [..., M]."""
    return uniform[..., 0, :].clamp(_TINY, _BELOW_ONE)  # [..., M]


def at_least_float32(inputs: Tensor) -> Tensor:
    """Half precision is enough for a policy's outputs, and too little for sums of logarithms."""
    return inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs


def illegal_logit(dtype: torch.dtype) -> float:
    """A logit beside which any other leaves no probability, in float32 not even the smallest.

    It is finite, and in float32 far enough from the largest number that a product with a gradient
    is finite too: 0 · ∞ would be NaN in entropies and gradients.
    """
    return max(-1e18, torch.finfo(dtype).min)


def mask_logits(inputs: Tensor, mask: Any, options: str) -> Tensor:
    """Logits [..., D] with those for which the mask [..., D] is 0 made `illegal_logit`s.

    Args:
        inputs: logits.
        mask: of any dtype.
        options: what there is one number for, for the error.

    Raises:
        ValueError: the mask is no tensor, or has another shape.
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
    """`other`, if a KL divergence from one to the other is defined.

    Raises:
        TypeError: it is not.
    """
    if type(other) is not type(one):
        raise TypeError(f"KL of a {type(one).__name__} to a {type(other).__name__} is not defined")
    return other


class Constants:
    """Arrays that belong to a spec, as tensors on every device that asked for them."""

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self._arrays = arrays
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors, copied there once."""
        if device not in self._on:
            # Who asks first may be acting, and who asks next training, where a tensor that was
            # made in inference mode could not be used.
            with torch.inference_mode(False):
                tensors = tuple(torch.from_numpy(array).to(device) for array in self._arrays)
            self._on[device] = tensors
        return self._on[device]
