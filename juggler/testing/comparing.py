"""Compares trees of tensors or arrays bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Assert that trees are equal bit for bit, NaNs included.

    Raises:
        AssertionError: they differ; names the place.
    """
    if isinstance(one, Mapping):
        must(one.keys() == other.keys(), f"{where}: {sorted(one)} and {sorted(other)}")
        for key, branch in one.items():
            assert_same(branch, other[key], f"{where}/{key}")
        return
    must(one.dtype == other.dtype, f"{where}: dtypes are {one.dtype} and {other.dtype}")
    try:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    except AssertionError as error:
        raise AssertionError(f"{where}: {str(error).strip()}") from None


def differ(one: Any, other: Any) -> bool:
    """Return whether two trees differ."""
    try:
        assert_same(one, other)
    except AssertionError:
        return True
    return False


def copied(tree: Any) -> Any:
    """Copy a tree of tensors or arrays."""
    if isinstance(tree, Mapping):
        return {key: copied(branch) for key, branch in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else np.array(tree)


def checked(where: str, check: Callable[[], None]) -> None:
    """Raises:
    AssertionError: from the check, with the place.
    """
    try:
        check()
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error


def must(condition: bool, otherwise: str) -> None:
    """Raises:
    AssertionError: with this text, unless the condition holds.
    """
    if not condition:
        raise AssertionError(otherwise)
