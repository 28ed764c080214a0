"""Access to single arrays within trees, and to single spaces within spaces.

Torch is only imported where there are tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.trees import Path

if TYPE_CHECKING:
    from torch import Tensor

#: The key of the environment's observation, if other keys were added.
OBSERVATION: Final = "observation"

#: The dtypes in which policies act, by the kind of numbers in an action space.
_ACTED: Final[dict[str, type[np.generic]]] = {
    "i": np.int64,
    "u": np.int64,
    "f": np.float32,
    "b": np.bool_,
}


def acted_dtype(space: Space[Any]) -> type[np.generic]:
    """Return the dtype in which policies act for an action leaf."""
    if isinstance(space, spaces.MultiBinary):
        return np.int8
    return _ACTED[np.dtype(space.dtype).kind]


def observed_leaves(space: Space[Any]) -> dict[Path, Space[Any]]:
    """Return the observation leaves by path, without action masks.

    Raises:
        UnsupportedSpace: there is no encoding for the space.
    """
    return {path: leaf for path, leaf in space_leaves(space) if path[:1] != (ACTION_MASK,)}


def holds_masks(space: Space[Any]) -> bool:
    """Return whether an observation space has an action mask."""
    return isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces


def at(tree: Any, path: Path) -> Any:
    """Return the array of a tree, or the leaf of a space."""
    for key in path:
        tree = tree[key]
    return tree


def replaced(tree: Any, leaves: Mapping[Path, Any]) -> Any:
    """Return a tree with other arrays at some of its paths."""
    if () in leaves:
        return leaves[()]
    changed = dict(tree)
    for key in {path[0] for path in leaves}:
        below = {path[1:]: leaf for path, leaf in leaves.items() if path[0] == key}
        changed[key] = replaced(tree[key], below)
    return changed


def space_with(space: Space[Any], leaves: Mapping[Path, Space[Any]]) -> Space[Any]:
    """Return a space with other leaves at some of its paths."""
    if () in leaves:
        return leaves[()]
    below: dict[str, dict[Path, Space[Any]]] = {}
    for path, leaf in leaves.items():
        below.setdefault(path[0], {})[path[1:]] = leaf
    if isinstance(space, spaces.Dict):
        return spaces.Dict(
            {key: space_with(child, below.get(key, {})) for key, child in space.spaces.items()}
        )
    if isinstance(space, spaces.Tuple):
        children = enumerate(space.spaces)
        return spaces.Tuple([space_with(child, below.get(str(i), {})) for i, child in children])
    return space


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # without it, there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def in_dtype(values: Any, dtype: Any) -> Any:
    """Return an array or tensor in a dtype, copied only if needed."""
    if _is_tensor(values):
        import torch

        return values.to(torch.from_numpy(np.empty(0, dtype)).dtype)
    return np.asarray(values, dtype)


def beside(tensor: Tensor, array: NDArray[Any]) -> Tensor:
    """Return an array [...] as a tensor on another tensor's device."""
    import torch

    return torch.from_numpy(array).to(tensor.device)


def joined(parts: Sequence[Any], axis: int) -> Any:
    """Concatenate arrays or tensors along an axis."""
    if _is_tensor(parts[0]):
        import torch

        return torch.cat(list(parts), axis)
    return np.concatenate(parts, axis)


class LeafFunctions:
    """Functions for single arrays of a tree; other arrays are unchanged."""

    def __init__(self, functions: Mapping[Path, Callable[[Any], Any]]) -> None:
        self.functions = dict(functions)
        self._only = self.functions.get(())

    def __call__(self, tree: Any) -> Any:
        if self._only is not None:
            return self._only(tree)
        return replaced(tree, {path: f(at(tree, path)) for path, f in self.functions.items()})
