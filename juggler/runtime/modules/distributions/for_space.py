"""Distributions of choices and nested spaces, and the choice by space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from operator import add
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import logsigmoid

from juggler.runtime.modules.distributions.base import (
    ActionDistribution,
    Actions,
    Constants,
    DistributionSpec,
    GaussianSpec,
    SquashedGaussianSpec,
    at_least_float32,
    illegal_logit,
    mask_logits,
    one_uniform,
    same_kind,
)
from juggler.runtime.near_matches import nearest
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.trees import path_name


class Categorical(ActionDistribution):
    """One of n actions that begin at `start`, by logits [..., n]."""

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


class _GumbelSpec(DistributionSpec):
    """Draws noise with which an argmax of logits follows their softmax.

    The noise is finite, between -4.5 and 17.
    """

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        # torch's exponential_ takes four times as long.
        noise = super().draw_noise(leading_shape, generator)  # [..., M]
        return noise.log_().neg_().log_().neg_()  # [..., M]

    def noise_from(self, uniform: Tensor) -> Tensor:
        return -(-one_uniform(uniform).log()).log()  # [..., M]


class CategoricalSpec(_GumbelSpec):
    """For `Discrete(n, start)`: n logits; Gumbel noise; masks [..., n]."""

    def __init__(self, n: int, start: int = 0) -> None:
        super().__init__(inputs_size=n, noise_size=n)
        self.start = start

    def __call__(self, inputs: Tensor) -> Categorical:
        return Categorical(inputs, self.start)

    def mask(self, inputs: Tensor, mask: Any) -> Tensor:
        return mask_logits(inputs, mask, f"the {self.inputs_size} actions")  # [..., n]


class MultiCategorical(ActionDistribution):
    """k independent categoricals.

    Args:
        logits: [..., k, n], n options for each choice; missing options of a choice are illegal.
        start: [k], the first option of each choice; None: 0.
        action_shape: its product is k.
    """

    def __init__(self, logits: Tensor, start: Tensor | None, action_shape: tuple[int, ...]) -> None:
        self.each = Categorical(logits)
        self.start = start
        self.action_shape = action_shape

    def log_prob(self, actions: Tensor) -> Tensor:
        flat = actions.reshape(self.each.logits.shape[:-1])  # [..., k]
        index = flat if self.start is None else flat - self.start  # [..., k]
        return self.each.log_prob(index).sum(-1)  # [...]

    def entropy(self) -> Tensor:
        return self.each.entropy().sum(-1)  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        return self.each.kl(same_kind(self, other).each).sum(-1)  # [...]

    def mode(self) -> Tensor:
        return self._actions(self.each.mode())  # [..., *action shape]

    def sample(self, noise: Tensor) -> Tensor:
        index = self.each.sample(noise.reshape(self.each.logits.shape))  # [..., k]
        return self._actions(index)  # [..., *action shape]

    def _actions(self, index: Tensor) -> Tensor:
        flat = index if self.start is None else index + self.start  # [..., k]
        return flat.reshape(flat.shape[:-1] + self.action_shape)  # [..., *action shape]


class MultiCategoricalSpec(_GumbelSpec):
    """Distribution for `MultiDiscrete`: concatenated logits, Gumbel noise.

    A mask has the layout of the logits: [..., sum of nvec].

    Args:
        nvec: the number of options of each of the k choices, in any shape.
        start: the first option of each, in the same shape; None: 0.
    """

    def __init__(self, nvec: ArrayLike, start: ArrayLike | None = None) -> None:
        options = np.asarray(nvec, np.int64)  # [*action shape]
        sizes = options.reshape(-1)  # [k]
        k, n = sizes.size, int(sizes.max())
        super().__init__(inputs_size=int(sizes.sum()), noise_size=k * n)
        self.action_shape = options.shape
        self._table = k, n
        first = np.zeros(k, np.int64) if start is None else np.asarray(start).reshape(-1)  # [k]
        self._has_start = bool(first.any())
        # A table of the options, as wide as the largest choice: which of its entries exist, and the
        # positions of their logits among the outputs.
        exists = np.arange(n) < sizes[:, None]  # [k, n]
        places = np.where(exists, np.arange(n) + (np.cumsum(sizes) - sizes)[:, None], 0)  # [k, n]
        self._is_full = bool(exists.all())
        self._constants = Constants(first.astype(np.int64), exists, places.reshape(-1))

    def __call__(self, inputs: Tensor) -> MultiCategorical:
        start, exists, places = self.options_on(inputs.device)
        table = inputs.shape[:-1] + self._table  # [...], k, n
        if self._is_full:
            logits = inputs.reshape(table)  # [..., k, n]
        else:
            found = inputs.index_select(-1, places).reshape(table)  # [..., k, n]
            logits = torch.where(exists, found, illegal_logit(inputs.dtype))  # [..., k, n]
        return MultiCategorical(logits, start if self._has_start else None, self.action_shape)

    def options_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The table of options on a device.

        Returns the first option of each choice [k], which options exist [k, n], and the positions
        of their logits among the outputs [k * n].
        """
        return self._constants.on(device)

    def mask(self, inputs: Tensor, mask: Any) -> Tensor:
        options = f"the {self.inputs_size} options, choice by choice"
        return mask_logits(inputs, mask, options)  # [..., D]


class Bernoulli(ActionDistribution):
    """Independent bits, each 1 with probability sigmoid(logit), for logits [..., k]."""

    def __init__(self, logits: Tensor, action_shape: tuple[int, ...]) -> None:
        self.logits = at_least_float32(logits)  # [..., k]
        self.action_shape = action_shape

    def log_prob(self, actions: Tensor) -> Tensor:
        bits = actions.reshape(self.logits.shape) != 0  # [..., k]
        return logsigmoid(torch.where(bits, self.logits, -self.logits)).sum(-1)  # [...]

    def entropy(self) -> Tensor:
        on, off, log_on, log_off = self._chances()  # [..., k] each
        return -(on * log_on + off * log_off).sum(-1)  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        on, off, log_on, log_off = self._chances()  # [..., k] each
        _, _, its_log_on, its_log_off = same_kind(self, other)._chances()
        return (on * (log_on - its_log_on) + off * (log_off - its_log_off)).sum(-1)  # [...]

    def mode(self) -> Tensor:
        return self._actions(self.logits > 0)  # [..., *action shape]

    def sample(self, noise: Tensor) -> Tensor:
        return self._actions(noise < torch.sigmoid(self.logits))  # [..., *action shape]

    def _chances(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return probabilities of 1 and 0, and their logarithms, [..., k] each."""
        x = self.logits
        return torch.sigmoid(x), torch.sigmoid(-x), logsigmoid(x), logsigmoid(-x)

    def _actions(self, bits: Tensor) -> Tensor:
        return bits.to(torch.int8).reshape(bits.shape[:-1] + self.action_shape)


class BernoulliSpec(DistributionSpec):
    """For `MultiBinary` of any shape: k logits; uniform noise.

    Bits that are 0 in a mask [..., k] stay 0.
    """

    def __init__(self, action_shape: tuple[int, ...]) -> None:
        bits = math.prod(action_shape)
        super().__init__(inputs_size=bits, noise_size=bits)
        self.action_shape = action_shape

    def __call__(self, inputs: Tensor) -> Bernoulli:
        return Bernoulli(inputs, self.action_shape)

    def mask(self, inputs: Tensor, mask: Any) -> Tensor:
        if isinstance(mask, Tensor) and mask.shape == inputs.shape[:-1] + self.action_shape:
            mask = mask.reshape(inputs.shape)  # [..., k]
        return mask_logits(inputs, mask, f"the {self.inputs_size} bits")  # [..., k]


class Composite(ActionDistribution):
    """Independent distributions by key, each for one branch of the action.

    Args:
        parts: the distributions.
        noise_sizes: number of random numbers of each part, in order.
    """

    def __init__(self, parts: Mapping[str, ActionDistribution], noise_sizes: list[int]) -> None:
        self.parts = parts
        self._noise_sizes = noise_sizes

    def log_prob(self, actions: Actions) -> Tensor:
        return reduce(add, (part.log_prob(actions[key]) for key, part in self.parts.items()))

    def entropy(self) -> Tensor:
        return reduce(add, (part.entropy() for part in self.parts.values()))  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        others = same_kind(self, other).parts
        if others.keys() != self.parts.keys():
            raise TypeError(
                f"KL of a Composite of {sorted(self.parts)} to one of {sorted(others)} "
                "is not defined"
            )
        return reduce(add, (part.kl(others[key]) for key, part in self.parts.items()))  # [...]

    def mode(self) -> dict[str, Actions]:
        return {key: part.mode() for key, part in self.parts.items()}

    def sample(self, noise: Tensor) -> dict[str, Actions]:
        noises = noise.split_with_sizes(self._noise_sizes, -1)
        parts = zip(self.parts.items(), noises, strict=True)
        return {key: part.sample(part_noise) for (key, part), part_noise in parts}


class CompositeSpec(DistributionSpec):
    """Distribution for `Dict` and `Tuple`: concatenated parts.

    A mask is a map of the parts' masks by key; parts that it leaves out are not masked.

    Args:
        parts: at least one part by key; "0", "1", … for a Tuple.
    """

    def __init__(self, parts: Mapping[str, DistributionSpec]) -> None:
        self._inputs_sizes = [part.inputs_size for part in parts.values()]
        self._noise_sizes = [part.noise_size for part in parts.values()]
        super().__init__(sum(self._inputs_sizes), sum(self._noise_sizes))
        self.parts = dict(parts)

    def __call__(self, inputs: Tensor) -> Composite:
        parts = {key: part(part_inputs) for key, part, part_inputs in self._split(inputs)}
        return Composite(parts, self._noise_sizes)

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        draws = [part.draw_noise(leading_shape, generator) for part in self.parts.values()]
        return torch.cat(draws, -1)  # [..., M]

    def noise_from(self, uniform: Tensor) -> Tensor:
        noise = uniform.split_with_sizes(self._noise_sizes, -1)
        shares = zip(self.parts.values(), noise, strict=True)
        return torch.cat([part.noise_from(share) for part, share in shares], -1)  # [..., M]

    def mask(self, inputs: Tensor, mask: Any) -> Tensor:
        if not isinstance(mask, Mapping):
            raise ValueError(
                f"the action mask is a {type(mask).__name__}, not a map with keys out of "
                f"{list(self.parts)}"
            )
        # An unknown key would mask nothing, without an error.
        for key in mask:
            if key not in self.parts:
                raise ValueError(
                    f"the action mask has the key {key!r}, which the action does not have"
                    f"{nearest(key, self.parts)}"
                )
        masked = [
            _named(key, part, part_inputs, mask[key]) if key in mask else part_inputs
            for key, part, part_inputs in self._split(inputs)
        ]
        return torch.cat(masked, -1)  # [..., D]

    @property
    def log_std_inputs(self) -> list[int]:
        found, before = [], 0
        for part in self.parts.values():
            found += [before + i for i in part.log_std_inputs]
            before += part.inputs_size
        return found

    def why_not_finite(self, inputs: Tensor) -> str:
        for key, part, part_inputs in self._split(inputs):
            if why := part.why_not_finite(part_inputs):
                return f"in {key!r}, {why}"
        return ""

    def _split(self, inputs: Tensor) -> list[tuple[str, DistributionSpec, Tensor]]:
        """Return every part with its key and its outputs."""
        pieces = inputs.split_with_sizes(self._inputs_sizes, -1)
        return [
            (key, part, piece)
            for (key, part), piece in zip(self.parts.items(), pieces, strict=True)
        ]


def _named(key: str, part: DistributionSpec, inputs: Tensor, mask: Any) -> Tensor:
    try:
        return part.mask(inputs, mask)
    except ValueError as error:
        raise ValueError(f"in {key!r}, {error}") from error


def distribution_for(space: gymnasium.Space[Any], squash: bool = False) -> DistributionSpec:
    """Make the distribution spec for an action space, nested or not.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box of a float dtype, or a Dict or Tuple.
        squash: use tanh to keep Box actions between finite bounds. Otherwise actions are
            unbounded, and a connector fits them to the environment's bounds.

    Raises:
        UnsupportedSpace: the space, or one within it, has no distribution.
    """
    for path, leaf in space_leaves(space):
        at = f" at {path_name(path)}" if path else ""
        if isinstance(leaf, spaces.Box) and not np.issubdtype(leaf.dtype, np.floating):
            raise UnsupportedSpace(
                f"no action distribution for {leaf}{at}, a Box of whole numbers: "
                "make it a MultiDiscrete"
            )
        if 0 in (leaf.shape or ()):
            raise UnsupportedSpace(
                f"action space {leaf}{at} has no elements, and so nothing to choose: leave it out"
            )
    return _distribution_for(space, squash)


def _distribution_for(space: gymnasium.Space[Any], squash: bool) -> DistributionSpec:
    match space:
        case spaces.Dict():
            parts = space.spaces.items()
            return CompositeSpec({key: _distribution_for(part, squash) for key, part in parts})
        case spaces.Tuple():
            inner = enumerate(space.spaces)
            return CompositeSpec({str(i): _distribution_for(part, squash) for i, part in inner})
        case spaces.Discrete():
            return CategoricalSpec(int(space.n), int(space.start))
        case spaces.MultiDiscrete():
            return MultiCategoricalSpec(space.nvec, space.start)
        case spaces.MultiBinary():
            return BernoulliSpec(tuple(space.shape))
        # Without two finite bounds anywhere in a Box, there is nothing to squash.
        case spaces.Box() if squash and (space.bounded_below & space.bounded_above).any():
            return SquashedGaussianSpec(space.low, space.high)
        case _:
            return GaussianSpec(tuple(space.shape or ()))
