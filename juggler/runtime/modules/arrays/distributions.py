"""Action distributions on arrays: what acting needs of them.

Those that ship are in NumPy, by the very class of their specs. Any other goes through torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from juggler.runtime.modules.arrays.live import as_array, as_tensor
from juggler.runtime.modules.arrays.operations import sigmoid
from juggler.runtime.modules.distributions import (
    BernoulliSpec,
    CategoricalSpec,
    ClippedGaussianSpec,
    CompositeSpec,
    DistributionSpec,
    GaussianSpec,
    MultiCategoricalSpec,
    SquashedGaussianSpec,
)
from juggler.runtime.modules.distributions.base import illegal_logit
from juggler.runtime.modules.distributions.gaussian import LARGEST_LOG_STD
from juggler.runtime.wire.structures import tree_map

Array = NDArray[Any]
_ILLEGAL = np.float32(illegal_logit(torch.float32))


class ArrayDistribution(Protocol):
    """See `DistributionSpec` and `ActionDistribution`, which do the same with tensors."""

    def sample(self, inputs: Array, noise: Array) -> Any:
        """Actions [..., *action shape] for inputs [..., D] and noise [..., M]."""

    def mode(self, inputs: Array) -> Any:
        """The most likely actions [..., *action shape] for inputs [..., D]."""

    def mask(self, inputs: Array, mask: Any) -> Array:
        """Inputs [..., D] that give illegal actions no probability."""


def array_distribution(spec: DistributionSpec) -> ArrayDistribution:
    """What a spec stands for, on arrays."""
    return _SHIPPED.get(type(spec), _InTorch)(spec)


class _InTorch:
    def __init__(self, spec: DistributionSpec) -> None:
        self._spec = spec

    def sample(self, inputs: Array, noise: Array) -> Any:
        with torch.inference_mode():
            drawn = self._spec(as_tensor(inputs)).sample(as_tensor(noise))
            return tree_map(as_array, drawn)

    def mode(self, inputs: Array) -> Any:
        with torch.inference_mode():
            return tree_map(as_array, self._spec(as_tensor(inputs)).mode())

    def mask(self, inputs: Array, mask: Any) -> Array:
        with torch.inference_mode():
            masks = tree_map(as_tensor, mask)
            masked: Array = self._spec.mask(as_tensor(inputs), masks).numpy()
            return masked


class _Categorical:
    def __init__(self, spec: CategoricalSpec) -> None:
        self._start = spec.start

    def sample(self, inputs: Array, noise: Array) -> Array:
        return self.mode(inputs + noise)  # [...]

    def mode(self, inputs: Array) -> Array:
        best: Array = inputs.argmax(-1)  # [...]
        return best + self._start if self._start else best

    def mask(self, inputs: Array, mask: Any) -> Array:
        return _masked(inputs, mask)  # [..., n]


class _MultiCategorical:
    def __init__(self, spec: MultiCategoricalSpec) -> None:
        start, exists, places = (each.numpy() for each in spec.options_on(torch.device("cpu")))
        self._start, self._exists, self._places = start, exists, places  # [k], [k, n], [k * n]
        self._action_shape = spec.action_shape

    def sample(self, inputs: Array, noise: Array) -> Array:
        table = self._table(inputs)  # [..., k, n]
        return self._best(table + noise.reshape(table.shape))  # [..., *action shape]

    def mode(self, inputs: Array) -> Array:
        return self._best(self._table(inputs))  # [..., *action shape]

    def mask(self, inputs: Array, mask: Any) -> Array:
        return _masked(inputs, mask)  # [..., D]

    def _table(self, inputs: Array) -> Array:
        found = inputs[..., self._places].reshape(*inputs.shape[:-1], *self._exists.shape)
        return np.where(self._exists, found, _ILLEGAL)  # [..., k, n]

    def _best(self, table: Array) -> Array:
        actions: Array = table.argmax(-1) + self._start  # [..., k]
        return actions.reshape(*actions.shape[:-1], *self._action_shape)


class _Bernoulli:
    def __init__(self, spec: BernoulliSpec) -> None:
        self._action_shape = spec.action_shape

    def sample(self, inputs: Array, noise: Array) -> Array:
        return self._actions(noise < sigmoid(inputs))  # [..., *action shape]

    def mode(self, inputs: Array) -> Array:
        return self._actions(inputs > 0)  # [..., *action shape]

    def mask(self, inputs: Array, mask: Any) -> Array:
        return _masked(inputs, mask.reshape(inputs.shape))  # [..., k]

    def _actions(self, bits: Array) -> Array:
        return bits.astype(np.int8).reshape(*bits.shape[:-1], *self._action_shape)


class _Gaussian:
    def __init__(self, spec: GaussianSpec) -> None:
        self._spec, self._size, self._action_shape = spec, spec.noise_size, spec.action_shape

    def sample(self, inputs: Array, noise: Array) -> Array:
        actions = np.exp(inputs[..., self._size :])  # [..., M]
        actions *= noise
        actions += inputs[..., : self._size]
        return self._fitted(actions)  # [..., *action shape]

    def mode(self, inputs: Array) -> Array:
        return self._fitted(inputs[..., : self._size])  # [..., *action shape]

    def mask(self, inputs: Array, mask: Any) -> Array:
        raise ValueError(f"{type(self._spec).__name__} takes no action mask: leave it out")

    def _fitted(self, actions: Array) -> Array:
        return actions.reshape(*actions.shape[:-1], *self._action_shape)


class _SquashedGaussian(_Gaussian):
    def __init__(self, spec: SquashedGaussianSpec) -> None:
        super().__init__(spec)
        self._bounds = [each.numpy() for each in spec.bounds_on(torch.device("cpu"))]  # [M] each

    def _fitted(self, actions: Array) -> Array:
        bounded, low, width, lowest, highest = self._bounds
        squashed = low + width * sigmoid(2 * actions)  # [..., M]
        np.clip(squashed, lowest, highest, out=squashed)
        return super()._fitted(np.where(bounded, squashed, actions))


class _ClippedGaussian(_SquashedGaussian):
    def sample(self, inputs: Array, noise: Array) -> Array:
        _, low, width, lowest, highest = self._bounds
        log_std = inputs[..., self._size :]  # [..., M]
        anywhere = log_std > LARGEST_LOG_STD  # [..., M]
        actions = np.exp(log_std)  # [..., M]
        actions *= noise
        actions *= np.float32(0.5) * width
        actions += self.mode(inputs).reshape(actions.shape)
        if anywhere.any():  # as it is until learning begins
            actions = np.where(anywhere, low + width * _below(noise), actions)
        np.clip(actions, lowest, highest, out=actions)
        return actions.reshape(*actions.shape[:-1], *self._action_shape)


def _below(z: Array) -> Array:
    """P(x < z) for standard normal x, elementwise. NumPy has no error function."""
    chances = [0.5 * math.erfc(each) for each in (z * -math.sqrt(0.5)).ravel().tolist()]
    return np.array(chances, z.dtype).reshape(z.shape)


class _Composite:
    def __init__(self, spec: CompositeSpec) -> None:
        self._parts = {key: array_distribution(part) for key, part in spec.parts.items()}
        parts = spec.parts.values()
        self._inputs = _shares([part.inputs_size for part in parts])
        self._noise = _shares([part.noise_size for part in parts])

    def sample(self, inputs: Array, noise: Array) -> dict[str, Any]:
        shares = zip(self._parts.items(), self._inputs, self._noise, strict=True)
        return {
            key: part.sample(inputs[..., of_inputs], noise[..., of_noise])
            for (key, part), of_inputs, of_noise in shares
        }

    def mode(self, inputs: Array) -> dict[str, Any]:
        shares = zip(self._parts.items(), self._inputs, strict=True)
        return {key: part.mode(inputs[..., share]) for (key, part), share in shares}

    def mask(self, inputs: Array, mask: Any) -> Array:
        masked = inputs.copy()  # [..., D]
        for (key, part), share in zip(self._parts.items(), self._inputs, strict=True):
            if key in mask:
                masked[..., share] = part.mask(inputs[..., share], mask[key])
        return masked


def _shares(sizes: list[int]) -> list[slice]:
    """Where the numbers of each part are, one part after the other."""
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _masked(inputs: Array, mask: Any) -> Array:
    """Inputs [..., D], illegal where the mask [..., D] is 0."""
    return np.where(mask, inputs, _ILLEGAL)


_SHIPPED: dict[type[DistributionSpec], Callable[[Any], ArrayDistribution]] = {
    CategoricalSpec: _Categorical,
    MultiCategoricalSpec: _MultiCategorical,
    BernoulliSpec: _Bernoulli,
    GaussianSpec: _Gaussian,
    SquashedGaussianSpec: _SquashedGaussian,
    ClippedGaussianSpec: _ClippedGaussian,
    CompositeSpec: _Composite,
}
