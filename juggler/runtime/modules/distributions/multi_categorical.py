"""The distribution for MultiDiscrete: several independent choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from juggler.runtime.modules.distributions.base import (
    ActionDistribution,
    Constants,
    DistributionSpec,
    illegal_logit,
    mask_logits,
    same_kind,
)
from juggler.runtime.modules.distributions.categorical import (
    Categorical,
    gumbel_from,
    gumbel_noise,
)


class MultiCategorical(ActionDistribution):
    """k independent categoricals.

    Args:
        logits: [..., k, n], n options for each choice; options that a choice does not have are
            illegal.
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


class MultiCategoricalSpec(DistributionSpec):
    """For `MultiDiscrete(nvec, start)`: the logits of one choice after the other; Gumbel noise.

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
        """The table of the options, on a device: the first of each choice [k], which exist [k, n],
        and the positions of their logits among the outputs [k * n]."""
        return self._constants.on(device)

    def zeros(self, leading_shape: Sequence[int]) -> Tensor:
        return torch.zeros((*leading_shape, *self.action_shape), dtype=torch.int64)

    def draw_noise(
        self, leading_shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        return gumbel_noise(leading_shape, self.noise_size, generator)  # [..., k * n]

    def noise_from(self, uniform: Tensor) -> Tensor:
        return gumbel_from(uniform)  # [..., k * n]

    def mask(self, inputs: Tensor, mask: Any) -> Tensor:
        options = f"the {self.inputs_size} options, those of one choice after the other"
        return mask_logits(inputs, mask, options)  # [..., D]
