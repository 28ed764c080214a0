"""Moments: counts, means and sums of squared deviations that can be merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.trees import Tree

#: The keys of moments in a tree.
KEYS = frozenset({"count", "mean", "m2"})


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The mean and the variance of samples [...], for each number separately.

    Two of them are merged with the pairwise formula of Chan, Golub & LeVeque 1979, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances". It stays accurate when
    deviations are small compared with the mean; sums of squares do not (Chan, Golub & LeVeque 1983,
    "Algorithms for Computing the Sample Variance: Analysis and Recommendations").
    """

    count: NDArray[np.float64]  # []
    mean: NDArray[np.float64]  # [...]
    m2: NDArray[np.float64]  # [...] sum of squared deviations from the mean

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Moments:
        """The moments of no samples."""
        return cls(np.zeros(()), np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, samples: NDArray[np.generic]) -> Moments:
        """The moments of samples [B, ...], computed in two passes."""
        if not len(samples):
            return cls.none(samples.shape[1:])
        x = samples.astype(np.float64)  # [B, ...]
        mean = x.mean(0)  # [...]
        m2 = np.square(x - mean).sum(0)  # [...]
        return cls(np.array(float(len(x))), np.asarray(mean), np.asarray(m2))

    def merged(self, other: Moments) -> Moments:
        """The moments of the samples behind both."""
        if not other.count:
            return self
        if not self.count:
            return other
        count = self.count + other.count  # []
        share = other.count / count  # []
        apart = other.mean - self.mean  # [...]
        return Moments(
            np.asarray(count),
            np.asarray(self.mean + apart * share),
            np.asarray(self.m2 + other.m2 + np.square(apart) * (self.count * share)),
        )

    @property
    def variance(self) -> NDArray[np.float64]:
        """The variance of the samples themselves [...]; 0 if there are none."""
        return np.asarray(self.m2 / np.maximum(self.count, 1))

    def to_tree(self) -> dict[str, Tree]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    @classmethod
    def from_tree(cls, tree: Tree) -> Moments:
        """The moments in a tree from an untrusted source.

        Raises:
            ValueError: the tree does not hold moments, or no samples could have these.
        """
        if not is_moments(tree):
            raise ValueError(f"moments are the arrays {sorted(KEYS)}")
        arrays = {key: np.asarray(array) for key, array in dict(tree).items()}
        for key, array in arrays.items():
            if array.dtype != np.float64:
                raise ValueError(f"{key!r} of moments must be float64, not {array.dtype}")
            if not np.isfinite(array).all():
                raise ValueError(f"{key!r} of moments holds what is not finite")
        moments = cls(**arrays)
        if moments.count.shape or moments.mean.shape != moments.m2.shape:
            raise ValueError(
                f"moments of shapes {moments.count.shape}, {moments.mean.shape} and "
                f"{moments.m2.shape} do not belong together"
            )
        if moments.count < 0 or (moments.m2 < 0).any():
            raise ValueError("moments with a negative count or sum of squares")
        return moments


def is_moments(tree: object) -> TypeGuard[Mapping[str, NDArray[np.generic]]]:
    """Whether this branch of a tree has the form that `Moments.to_tree` makes."""
    return (
        isinstance(tree, Mapping)
        and tree.keys() == KEYS
        and all(isinstance(array, np.ndarray) for array in tree.values())
    )
