"""Compares what NumPy did with what torch did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.structures import tree_map

#: How far outputs in NumPy may be from torch's, relative and absolute: a thousand roundings.
_TOLERANCE = 1e-4


def difference(acted: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """In what a step in NumPy differs from the same step in torch; "": in nothing.

    Args:
        acted: trees of arrays by name; None: it does not say.
        expected: likewise, of torch.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    for name, mine in acted.items():
        if mine is not None and (far := _differences(mine, expected[name])):
            return f"its {name} differ by {max(far):.2g}"
    return ""


def _differences(mine: Any, its: Any) -> list[float]:
    """By how much leaves differ, of those that differ by more than the tolerance."""
    found: list[float] = []

    def compare(one: NDArray[Any], other: NDArray[Any]) -> None:
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ValueError(f"{one.dtype}{list(one.shape)} for {other.dtype}{list(other.shape)}")
        far = ~np.isclose(one, other, _TOLERANCE, _TOLERANCE, equal_nan=True)
        if far.any():
            distances = np.abs(one[far].astype(np.float64) - other[far])
            found.append(float(np.nan_to_num(distances, nan=np.inf).max()))

    with np.errstate(all="ignore"):
        tree_map(compare, mine, its)
    return found
