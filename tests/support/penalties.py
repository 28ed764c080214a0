"""Gradient penalties, worked out slowly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def slow_penalties(
    logit: Callable[[np.ndarray], float], some: np.ndarray, others: np.ndarray, shares: np.ndarray
) -> np.ndarray:
    """Gradient penalties [B] of rows [B, F], by central differences in float64."""
    found = []
    for x, y, share in zip(some, others, shares, strict=True):
        between = share * x + (1 - share) * y
        slopes = [
            (logit(between + step) - logit(between - step)) / 2e-5 for step in 1e-5 * np.eye(len(x))
        ]
        found.append((np.linalg.norm(slopes) - 1) ** 2)
    return np.array(found)
