"""The distribution for MultiBinary: independent bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from juggler.runtime.modules.distributions.base import (
    ActionDistribution,
    DistributionSpec,
    at_least_float32,
    mask_logits,
    same_kind,
)


class Bernoulli(ActionDistribution):
    """Independent bits, each 1 with probability sigmoid(logit), for logits [..., k]."""

    def __init__(self, logits: Tensor, action_shape: tuple[int, ...]) -> None:
        self.logits = at_least_float32(logits)  # [..., k]
        self.action_shape = action_shape

    def log_prob(self, actions: Tensor) -> Tensor:
        bits = actions.reshape(self.logits.shape) != 0  # [..., k]
        return logsigmoid(torch.where(bits, self.logits, -self.logits)).sum(-1)  # [...]

    def entropy(self) -> Tensor:
        return -(self._on() * self._log_on() + self._off() * self._log_off()).sum(-1)  # [...]

    def kl(self, other: ActionDistribution) -> Tensor:
        other = same_kind(self, other)
        on = self._on() * (self._log_on() - other._log_on())  # [..., k]
        off = self._off() * (self._log_off() - other._log_off())  # [..., k]
        return (on + off).sum(-1)  # [...]

    def mode(self) -> Tensor:
        return self._actions(self.logits > 0)  # [..., *action shape]

    def sample(self, noise: Tensor) -> Tensor:
        return self._actions(noise < self._on())  # [..., *action shape]

    def _on(self) -> Tensor:
        return torch.sigmoid(self.logits)  # [..., k]

    def _off(self) -> Tensor:
        return torch.sigmoid(-self.logits)  # [..., k]

    def _log_on(self) -> Tensor:
        return logsigmoid(self.logits)  # [..., k]

    def _log_off(self) -> Tensor:
        return logsigmoid(-self.logits)  # [..., k]

    def _actions(self, bits: Tensor) -> Tensor:
        return bits.to(torch.int8).reshape(bits.shape[:-1] + self.action_shape)


class BernoulliSpec(DistributionSpec):
    """For `MultiBinary` of any shape: k logits; uniform noise.

    A mask [..., k] says which bits may be 1; the others stay 0.
    """

    def __init__(self, action_shape: tuple[int, ...]) -> None:
        bits = math.prod(action_shape)
        super().__init__(inputs_size=bits, noise_size=bits)
        self.action_shape = action_shape

    def __call__(self, inputs: Tensor) -> Bernoulli:
        return Bernoulli(inputs, self.action_shape)

    def zeros(self, leading_shape: Sequence[int]) -> Tensor:
        return torch.zeros((*leading_shape, *self.action_shape), dtype=torch.int8)

    def mask(self, inputs: Tensor, mask: Any) -> Tensor:
        if isinstance(mask, Tensor) and mask.shape == inputs.shape[:-1] + self.action_shape:
            mask = mask.reshape(inputs.shape)  # [..., k]
        return mask_logits(inputs, mask, f"the {self.inputs_size} bits")  # [..., k]
