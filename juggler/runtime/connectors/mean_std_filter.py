"""The connector mean_std_filter: observations with mean 0 and standard deviation 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.connector import MergeableConnector, NotFinite, Space
from juggler.runtime.connectors.leaves import (
    LeafFunctions,
    at,
    beside,
    observed_leaves,
    replaced,
    space_with,
)
from juggler.runtime.connectors.moments import Moments
from juggler.runtime.wire.trees import Path, Tree, unflatten


class MeanStdFilter(MergeableConnector):
    """Subtracts the mean from every number of an observation, and divides by its standard
    deviation.

    Mean and deviation are over the live steps of all EnvRunners, as known at the start of a
    fragment. Before there are any, numbers pass unchanged. The filter applies to Box leaves of
    numbers, which become float32; uint8 (images), Discrete and other leaves and action masks stay
    as they are.

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
                "no Box of numbers but uint8"
            )
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
        deltas = {path: each.moments_of_watched(live) for path, each in self._filters.items()}
        self.forget()
        return _nested(deltas)

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
        # float32 numbers are close to their mean, so the difference loses little.
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
        # The same as np.clip, which takes longer for small arrays.
        np.maximum(x, -self._clip, out=x)
        np.minimum(x, self._clip, out=x)
        filtered: NDArray[np.float32] = x.astype(np.float32, copy=False)
        return filtered

    def of_tensors(self, numbers: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Numbers [B, ...] minus means [...], times scales [...]."""
        shifted = (numbers.to(mean.dtype) - mean) * scale  # [B, ...]
        return shifted.clamp(-self._clip, self._clip).float()  # [B, ...]

    def moments_of_watched(self, live: NDArray[np.bool_]) -> Moments:
        if not self.watched:
            return Moments.none(self.shape)
        samples = np.stack(self.watched)[live.T]  # [live steps, ...] in order of time
        with np.errstate(invalid="ignore", over="ignore"):  # reported below, in better words
            moments = Moments.of(samples)
        if not np.isfinite(moments.m2).all():
            bad = ~np.isfinite(samples).reshape(len(samples), -1).all(1)  # [live steps]
            steps, rows = np.nonzero(live.T)  # [live steps] both
            if bad.any():
                raise NotFinite(int(rows[bad][0]), int(steps[bad][0]))
            raise ValueError("observations are so large that their variance is not finite")
        return moments


def _nested(deltas: dict[Path, Moments]) -> Tree:
    """Moments by path, as one tree."""
    arrays = [
        ((*path, key), array)
        for path, moments in deltas.items()
        for key, array in moments.to_tree().items()
    ]
    return unflatten(arrays)  # type: ignore[arg-type]
