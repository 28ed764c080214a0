"""The distribution for Dict and Tuple: independent parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from juggler.runtime.modules.distributions.base import (
    ActionDistribution,
    Actions,
    DistributionSpec,
    same_kind,
)
from juggler.runtime.nearest import nearest


class Composite(ActionDistribution):
    """Independent distributions by key, each for one branch of the action.

    Args:
        parts: the distributions.
        noise_sizes: how many random numbers each of them takes, in order.
    """

    def __init__(self, parts: Mapping[str, ActionDistribution], noise_sizes: list[int]) -> None:
        self.parts = parts
        self._noise_sizes = noise_sizes

    def log_prob(self, actions: Actions) -> Tensor:
        return _sum([part.log_prob(actions[key]) for key, part in self.parts.items()])  # [...]

    def entropy(self) -> Tensor:
        return _sum([part.entropy() for part in self.parts.values()])  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        others = same_kind(self, other).parts
        if others.keys() != self.parts.keys():
            raise TypeError(
                f"KL of a Composite of {sorted(self.parts)} to one of {sorted(others)} "
                "is not defined"
            )
        return _sum([part.kl(others[key]) for key, part in self.parts.items()])  # [...]

    def mode(self) -> dict[str, Actions]:
        return {key: part.mode() for key, part in self.parts.items()}

    def sample(self, noise: Tensor) -> dict[str, Actions]:
        noises = noise.split_with_sizes(self._noise_sizes, -1)
        parts = zip(self.parts.items(), noises, strict=True)
        return {key: part.sample(part_noise) for (key, part), part_noise in parts}


class CompositeSpec(DistributionSpec):
    """For `Dict` and `Tuple`: the outputs, and the noise, of one part after the other.

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

    def zeros(self, leading_shape: Sequence[int]) -> dict[str, Actions]:
        return {key: part.zeros(leading_shape) for key, part in self.parts.items()}

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
        for key in mask:
            if key not in self.parts:
                raise ValueError(
                    f"the action mask has the key {key!r}, the action has not"
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
        """Every part with its key and its outputs."""
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


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
