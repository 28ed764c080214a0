"""Trees of tensors: a tensor, or a map of trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

#: A tensor, or a map of trees.
TensorTree = Any

#: How much of a step may differ by what comes before it, such as the norm of a gradient, and by how
#: many roundings what is there after it.
_OF_A_STEP: Final = 1e-4
_ROUNDINGS: Final = 4


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


def near(one: TensorTree, other: TensorTree, before: TensorTree) -> bool:
    """Whether two trees with the same names differ by no more than rounding. Integers must be the
    same.

    Args:
        one: a tree.
        other: a tree.
        before: of names that they have, what was there before a step: by that step they are
            compared, which may be much smaller than they are.
    """
    return _near(one, other, before, 1e-5, numbers=True)


def alike(one: TensorTree, other: TensorTree) -> bool:
    """Whether they differ by no more than sums do that add up in another order. Single numbers are
    not looked at, unless they are integers: one rounding may tip what they are a mean of."""
    return _near(one, other, {}, 0.01, numbers=False)


def _near(
    one: TensorTree, other: TensorTree, before: TensorTree, tolerance: float, *, numbers: bool
) -> bool:
    if isinstance(one, Mapping):
        return all(
            _near(each, other[name], before.get(name, {}), tolerance, numbers=numbers)
            for name, each in one.items()
        )
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not (one.ndim or numbers):
        return True
    rounding = _ROUNDINGS * torch.finfo(one.dtype).eps
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    allowed = tolerance * one.norm()
    if isinstance(before, Tensor):
        step = one - before.double().nan_to_num()
        allowed = _OF_A_STEP * step.norm() + rounding * one.norm()
    return bool((one - other).norm() <= allowed)
