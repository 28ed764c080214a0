"""The connectors one_hot and flatten, which turn observations into vectors of numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.connector import ObservationConnector, Space
from juggler.runtime.connectors.leaves import (
    OBSERVATION,
    LeafFunctions,
    at,
    beside,
    holds_masks,
    joined,
    observed_leaves,
    space_with,
)
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.choices import Choice, choices_of

#: Arrays or tensors [B, ...] -> float32 [B, f].
Encode = Callable[[Any], Any]


class OneHot(ObservationConnector):
    """Encodes Discrete and MultiDiscrete observations one-hot, as float32.

    Discrete(n) becomes [n], MultiDiscrete the concatenated vectors of its numbers; everything else
    stays as it is. Modules encode both themselves, from smaller batches. Use this connector for
    modules that take only vectors.
    """

    takes_tensors = True

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        encoders = {
            path: _OneHot(leaf)
            for path, leaf in observed_leaves(observation_space).items()
            if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete)
        }
        if not encoders:
            raise ValueError(
                f"one_hot has nothing to do: observations in {observation_space} hold neither "
                "Discrete nor MultiDiscrete"
            )
        self._encoders = LeafFunctions(encoders)
        leaves = {
            path: spaces.Box(0, 1, (encoder.size,), np.float32)
            for path, encoder in encoders.items()
        }
        super().__init__(space_with(observation_space, leaves), action_space)

    def __call__(self, observations: Any) -> Any:
        return self._encoders(observations)


class Flatten(ObservationConnector):
    """Turns the whole observation into one vector [F] of float32, in the order of the space.

    Discrete and MultiDiscrete observations are one-hot in it. An action mask stays beside it.
    """

    takes_tensors = True

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        leaves = observed_leaves(observation_space)
        if not leaves:
            raise ValueError(
                f"flatten has nothing to do: {observation_space} is an action mask alone"
            )
        self._encoders = [(path, _encoder(leaf)) for path, leaf in leaves.items()]
        bounds = [_bounds(leaf) for leaf in leaves.values()]
        low, high = (np.concatenate(each) for each in zip(*bounds, strict=True))  # [F] both
        flat: Space = spaces.Box(low, high, dtype=np.float32)
        self._has_mask = holds_masks(observation_space)
        if self._has_mask:
            flat = spaces.Dict(
                {OBSERVATION: flat, ACTION_MASK: at(observation_space, (ACTION_MASK,))}
            )
        super().__init__(flat, action_space)

    def __call__(self, observations: Any) -> Any:
        vectors = [encode(at(observations, path)) for path, encode in self._encoders]  # [B, f] each
        flat = vectors[0] if len(vectors) == 1 else joined(vectors, 1)  # [B, F]
        if self._has_mask:
            return {OBSERVATION: flat, ACTION_MASK: observations[ACTION_MASK]}
        return flat


class _OneHot:
    """Maps numbers [B, *shape] of a Discrete or MultiDiscrete space to float32 [B, n]."""

    def __init__(self, space: Space) -> None:
        if isinstance(space, spaces.Discrete):
            counts, starts = np.array([space.n]), np.array([space.start])  # [1] both
        else:
            assert isinstance(space, spaces.MultiDiscrete)
            counts, starts = space.nvec.reshape(-1), space.start.reshape(-1)  # [k] both
        counts = counts.astype(np.int64)
        (self._choice,) = choices_of([((), space)])
        self.size = int(counts.sum())
        # The index of each number's 0 in the vector.
        self._offsets = np.cumsum(counts) - counts - starts.astype(np.int64)  # [k]

    def __call__(self, numbers: Any) -> Any:
        if isinstance(numbers, Tensor):
            offsets = beside(numbers, self._offsets)  # [k]
            chosen = numbers.reshape(-1, len(self._offsets)).long() + offsets  # [B, k]
            ones = torch.zeros(chosen.shape[0], self.size, device=numbers.device)  # [B, n]
            return ones.scatter(-1, chosen, 1.0)  # [B, n]
        self._choice.require(numbers)
        places = numbers.reshape(len(numbers), len(self._offsets)) + self._offsets  # [B, k]
        vectors = np.zeros((len(numbers), self.size), np.float32)  # [B, n]
        np.put_along_axis(vectors, places, 1, 1)
        return vectors


def _encoder(space: Space) -> Encode:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return _OneHot(space)
    return functools.partial(_as_vectors, choices_of([((), space)]))


def _as_vectors(choices: list[Choice], array: Any) -> Any:
    if isinstance(array, Tensor):
        return array.flatten(1).float() if array.ndim > 1 else array[:, None].float()  # [B, f]
    for choice in choices:
        choice.require(array)
    return array.reshape(len(array), math.prod(array.shape[1:])).astype(np.float32)  # [B, f]


def _bounds(space: Space) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The smallest and largest values [f] of the vector that a leaf becomes."""
    if isinstance(space, spaces.Box):
        low, high = (bound.reshape(-1).astype(np.float32) for bound in (space.low, space.high))
        return low, high
    ones = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    size = _OneHot(space).size if ones else math.prod(space.shape or ())
    return np.zeros(size, np.float32), np.ones(size, np.float32)
