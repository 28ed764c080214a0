"""Connectors that change single observations and actions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.connector import (
    ActionConnector,
    MergeableConnector,
    NonFiniteObservation,
    ObservationConnector,
    Space,
)
from juggler.runtime.connectors.leaves import (
    OBSERVATION,
    LeafFunctions,
    at,
    beside,
    holds_masks,
    joined,
    observed_leaves,
    replaced,
    space_with,
)
from juggler.runtime.connectors.mergeable_state import Moments
from juggler.runtime.modules import encoders
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import choices_of, has_bounds, space_leaves, two_bounds
from juggler.runtime.wire.trees import Path, Tree, unflatten


class ClipActions(ActionConnector):
    """Clips numbers to the bounds of their Box."""

    takes_tensors = True

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        self._functions = LeafFunctions(
            {
                path: _Clip(leaf)
                for path, leaf in space_leaves(action_space)
                if isinstance(leaf, spaces.Box) and np.any(has_bounds(leaf))
            }
        )
        self.idle = not self._functions.functions
        super().__init__(observation_space, action_space)

    def __call__(self, actions: Any) -> Any:
        return self._functions(actions)

    def undo(self, actions: Any) -> Any:
        return actions


class RescaleActions(ActionConnector):
    """Maps the policy's actions in [-1, 1] to the environment's bounds.

    This applies to each number of a float Box with two finite bounds. A bound of 1e30 or more
    counts as infinite. All other numbers do not change. Actions beyond [-1, 1] become a bound.
    """

    takes_tensors = True

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        rescaled = {
            path: _Rescale(leaf)
            for path, leaf in space_leaves(action_space)
            if isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f" and two_bounds(leaf).any()
        }
        self.idle = not rescaled
        self._functions = LeafFunctions(rescaled)
        self._undo = LeafFunctions({path: each.undo for path, each in rescaled.items()})
        leaves = {path: each.space for path, each in rescaled.items()}
        super().__init__(observation_space, space_with(action_space, leaves))

    def __call__(self, actions: Any) -> Any:
        return self._functions(actions)

    def undo(self, actions: Any) -> Any:
        return self._undo(actions)


class _Clip:
    def __init__(self, space: spaces.Box) -> None:
        self._low, self._high = space.low, space.high

    def __call__(self, actions: Any) -> Any:
        if isinstance(actions, Tensor):
            low, high = beside(actions, self._low), beside(actions, self._high)  # [...] both
            return torch.minimum(torch.maximum(actions.to(low.dtype), low), high)  # [N, ...]
        # Compute in the dtype of the bounds: a float64 bound, rounded to float32, may lie outside
        # itself.
        clipped: NDArray[Any] = np.maximum(actions, self._low, dtype=self._low.dtype)  # [N, ...]
        np.minimum(clipped, self._high, out=clipped)  # [N, ...]
        return clipped


class _Rescale:
    def __init__(self, space: spaces.Box) -> None:
        bounded = two_bounds(space)  # [...]
        low, high = space.low, space.high  # [...] both
        self.space = spaces.Box(
            np.where(bounded, -1, low).astype(low.dtype),
            np.where(bounded, 1, high).astype(low.dtype),
            dtype=low.dtype.type,
        )
        # Halve first, because the whole width may exceed the range of the dtype.
        half_low, half_high = np.where(bounded, low, -1) / 2, np.where(bounded, high, 1) / 2
        self._middle = (half_high + half_low).astype(low.dtype)  # [...] 0 where not bounded
        self._half_width = (half_high - half_low).astype(low.dtype)  # [...] 1 there
        self._fit = _Clip(space)  # rounding may exceed the bounds

    def __call__(self, actions: Any) -> Any:
        if isinstance(actions, Tensor):
            half = beside(actions, self._half_width)  # [...]
            middle = beside(actions, self._middle)  # [...]
            return self._fit(actions.to(half.dtype) * half + middle)  # [N, ...]
        scaled = np.multiply(actions, self._half_width, dtype=self._half_width.dtype)  # [N, ...]
        scaled += self._middle
        return self._fit(scaled)

    def undo(self, actions: Any) -> Any:
        """Return actions [N, ...] from -1 to 1, where they are bounded.

        Bounds that allow one number have a width of 0: any action will do.
        """
        width = np.where(self._half_width > 0, self._half_width, 1)  # [...]
        return (np.asarray(actions) - self._middle) / width  # [N, ...]


class OneHot(ObservationConnector):
    """Encodes Discrete and MultiDiscrete observations one-hot, as float32.

    Discrete(n) becomes [n], MultiDiscrete the concatenated vectors of its numbers; everything else
    is unchanged. Modules encode both themselves, from smaller batches. Use this connector for
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
        # Modules see only the vectors, so these replace the spaces of the leaves.
        self._encoders = LeafFunctions(encoders)
        vectors = {path: encoder.space for path, encoder in encoders.items()}
        super().__init__(space_with(observation_space, vectors), action_space)

    def __call__(self, observations: Any) -> Any:
        return self._encoders(observations)


class Flatten(ObservationConnector):
    """Flattens the whole observation into one float32 vector [F].

    Discrete and MultiDiscrete observations are one-hot in it. An action mask stays separate.
    """

    takes_tensors = True

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        leaves = observed_leaves(observation_space)
        if not leaves:
            raise ValueError(
                f"flatten has nothing to do: {observation_space} is an action mask alone"
            )
        # Choices are one-hot; all vectors are put side by side.
        self._encoders = {
            path: _OneHot(leaf)
            if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete)
            else _AsVector(leaf)
            for path, leaf in leaves.items()
        }
        vectors = [encoder.space for encoder in self._encoders.values()]
        flat: Space = spaces.flatten_space(spaces.Tuple(vectors))  # [F]
        self._has_mask = holds_masks(observation_space)
        if self._has_mask:
            flat = spaces.Dict(
                {OBSERVATION: flat, ACTION_MASK: at(observation_space, (ACTION_MASK,))}
            )
        super().__init__(flat, action_space)

    def __call__(self, observations: Any) -> Any:
        vectors = [encode(at(observations, path)) for path, encode in self._encoders.items()]
        flat = vectors[0] if len(vectors) == 1 else joined(vectors, 1)  # [B, F]
        if self._has_mask:
            return {OBSERVATION: flat, ACTION_MASK: observations[ACTION_MASK]}
        return flat


class _OneHot:
    """Maps choices [B, *shape] to one-hot float32 [B, n]."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        self._layer = encoders.OneHotEncoder(space)
        (self._choice,) = choices_of([((), space)])
        self.space = spaces.Box(0, 1, (self._layer.size,), np.float32)

    def __call__(self, numbers: Any) -> Any:
        if isinstance(numbers, Tensor):
            return self._layer(numbers)  # [B, n]
        self._choice.require(numbers)
        return self._layer.of_arrays(numbers)  # [B, n]


class _AsVector:
    """Maps numbers [B, *shape] to float32 [B, f]."""

    def __init__(self, space: Space) -> None:
        self._choices = choices_of([((), space)])
        if isinstance(space, spaces.Box):
            low, high = (x.reshape(-1).astype(np.float32) for x in (space.low, space.high))
            self.space = spaces.Box(low, high, dtype=np.float32)
        else:
            self.space = spaces.Box(0, 1, (math.prod(space.shape or ()),), np.float32)

    def __call__(self, array: Any) -> Any:
        if isinstance(array, Tensor):
            return array.flatten(1).float() if array.ndim > 1 else array[:, None].float()  # [B, f]
        for choice in self._choices:
            choice.require(array)
        return array.reshape(len(array), math.prod(array.shape[1:])).astype(np.float32)  # [B, f]


class MeanStdFilter(MergeableConnector):
    """Subtracts the mean, and divides by the standard deviation.

    Mean and deviation are over the live steps of all EnvRunners, as known at the start of a
    fragment. Before the first ones, numbers pass unchanged. The filter applies to Box leaves of
    numbers, which become float32; uint8 (images), Discrete and other leaves and action masks are
    unchanged.

    Args:
        clip: results are clipped to [-clip, clip].
        epsilon: added to the variance.
    """

    takes_tensors = True

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        clip: float = 10.0,
        epsilon: float = 1e-8,
    ) -> None:
        if not (clip > 0 and epsilon > 0):
            raise ValueError(f"clip = {clip} and epsilon = {epsilon} must be above 0")
        self._filters: dict[Path, _Filter] = {
            path: _Filter(leaf, clip, epsilon)
            for path, leaf in observed_leaves(observation_space).items()
            if isinstance(leaf, spaces.Box) and leaf.dtype.kind in "fiu" and leaf.dtype != np.uint8
        }
        if not self._filters:
            raise ValueError(
                f"mean_std_filter has nothing to filter: observations in {observation_space} hold "
                "no Box of numbers, only uint8"
            )
        # Clipping bounds the results for any moments.
        self._functions = LeafFunctions(self._filters)
        leaves = {
            path: spaces.Box(-clip, clip, each.shape, np.float32)
            for path, each in self._filters.items()
        }
        super().__init__(space_with(observation_space, leaves), action_space)

    def __call__(self, observations: Any) -> Any:
        return self._functions(observations)

    def watch(self, observations: Any) -> None:
        for path, each in self._filters.items():
            each.watched.append(at(observations, path).copy())

    def take_delta(self, live: NDArray[np.bool_]) -> Tree:
        deltas = [
            ((*path, key), array)
            for path, each in self._filters.items()
            for key, array in each.moments_of_watched(live).to_tree().items()
        ]
        self.forget()
        return unflatten(deltas)

    def forget(self) -> None:
        for each in self._filters.values():
            each.watched.clear()

    def set_state(self, state: Tree) -> None:
        for path, each in self._filters.items():
            each.use(Moments.from_tree(at(state, path)))

    def numbers(self) -> dict[str, NDArray[Any]]:
        found = {}
        for place, each in enumerate(self._filters.values()):
            found[f"mean_{place}"], found[f"scale_{place}"] = each.mean, each.scale
        return found

    def with_numbers(self, observations: Any, numbers: Mapping[str, Tensor]) -> Any:
        filtered = {
            path: each.of_tensors(
                at(observations, path), numbers[f"mean_{place}"], numbers[f"scale_{place}"]
            )
            for place, (path, each) in enumerate(self._filters.items())
        }
        return replaced(observations, filtered)


class _Filter:
    """The filter of one leaf."""

    def __init__(self, space: spaces.Box, clip: float, epsilon: float) -> None:
        self.shape = space.shape
        self.watched: list[NDArray[Any]] = []  # [N, ...] for each step of a fragment
        self._clip, self._epsilon = clip, epsilon
        # Differences from the mean are small, so float32 is precise enough.
        self._dtype = np.float32 if space.dtype.itemsize <= 4 else np.float64
        self.use(Moments.none(space.shape))

    def use(self, moments: Moments) -> None:
        if moments.mean.shape != self.shape:
            raise ValueError(
                f"moments of observations of shape {moments.mean.shape}, here {self.shape}"
            )
        mean, scale = np.zeros(self.shape), np.ones(self.shape)  # [...] both
        if moments.count >= 2:
            mean, scale = moments.mean, 1 / np.sqrt(moments.variance + self._epsilon)
        self.mean, self.scale = mean.astype(self._dtype), scale.astype(self._dtype)

    def __call__(self, numbers: Any) -> Any:
        if isinstance(numbers, Tensor):
            mean, scale = beside(numbers, self.mean), beside(numbers, self.scale)  # [...] both
            return self.of_tensors(numbers, mean, scale)
        x = np.subtract(numbers, self.mean, dtype=self._dtype)  # [B, ...]
        x *= self.scale
        # Like np.clip, which takes longer for small arrays.
        np.maximum(x, -self._clip, out=x)
        np.minimum(x, self._clip, out=x)
        filtered: NDArray[np.float32] = x.astype(np.float32, copy=False)
        return filtered

    def of_tensors(self, numbers: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Return numbers [B, ...] minus means [...], times scales [...]."""
        shifted = (numbers.to(mean.dtype) - mean) * scale  # [B, ...]
        return shifted.clamp(-self._clip, self._clip).float()  # [B, ...]

    def moments_of_watched(self, live: NDArray[np.bool_]) -> Moments:
        if not self.watched:
            return Moments.none(self.shape)
        samples = np.stack(self.watched)[live.T]  # [live steps, ...] in order of time
        with np.errstate(invalid="ignore", over="ignore"):  # reported below, more clearly
            moments = Moments.of(samples)
        if not np.isfinite(moments.m2).all():
            bad = ~np.isfinite(samples).reshape(len(samples), -1).all(1)  # [live steps]
            steps, rows = np.nonzero(live.T)  # [live steps] both
            if bad.any():
                raise NonFiniteObservation(int(rows[bad][0]), int(steps[bad][0]))
            raise ValueError("observations are so large that their variance is not finite")
        return moments
