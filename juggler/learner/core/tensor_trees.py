"""Trees of tensors: a tensor, or a map of trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: A tensor, or a map of trees.
TensorTree = Any


def read(tree: TensorTree, told: list[object], leaves: list[Tensor]) -> None:
    """Collect the tensors of a tree, and all that operations on them may depend on."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        told += (tree.shape, tree.dtype, tree.stride())
        return
    told.append(tuple(tree))
    for each in tree.values():
        read(each, told, leaves)


def placed(tree: TensorTree, leaves: list[Tensor]) -> Any:
    """The tree with numbers from 0 on in place of its tensors, which become `leaves`."""
    if isinstance(tree, Mapping):
        return {name: placed(each, leaves) for name, each in tree.items()}
    leaves.append(tree)
    return len(leaves) - 1


def filled(template: Any, leaves: Sequence[Tensor]) -> TensorTree:
    """The inverse of `placed`."""
    if isinstance(template, dict):
        return {name: filled(each, leaves) for name, each in template.items()}
    return leaves[template]


def same(one: TensorTree, other: TensorTree) -> bool:
    """Whether two trees with the same names hold the same numbers; NaN is equal to NaN."""
    if isinstance(one, Mapping):
        return all(same(each, other[name]) for name, each in one.items())
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def near(one: TensorTree, other: TensorTree, tolerance: float = 0.01) -> bool:
    """Whether the vectors of two trees differ by no more than rounding, as sums in another order
    do. Single numbers are not looked at, since one rounding may tip what they count."""
    if isinstance(one, Mapping):
        return all(near(each, other[name], tolerance) for name, each in one.items())
    if not (one.ndim and one.is_floating_point()):
        return True
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    return bool((one - other).norm() <= tolerance * one.norm())
