"""Values of Gymnasium spaces as trees, and values outside a space.

The values of a Dict space are a map by its keys, of a Tuple space a map with the keys "0", "1", …,
and of every other space one array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.trees import Path, Tree, path_name


class OutsideSpace(ValueError):
    """An observation has a number that is not in its space.

    Attributes:
        row: row of the observation in its batch.
        what: the reason, for a message.
    """

    def __init__(self, row: int, what: str) -> None:
        super().__init__(f"an observation{what}")
        self.row = row
        self.what = what


class Choice(NamedTuple):
    """A Discrete, MultiDiscrete or MultiBinary leaf of a space.

    Attributes:
        path: of the leaf.
        space: of the leaf.
        first, last: min and max of its numbers: [...], or one number for all.
    """

    path: Path
    space: Space[Any]
    first: Any
    last: Any

    def outside(self, array: NDArray[Any]) -> tuple[int, ...] | None:
        """Find the index of the first number outside the space, if any.

        Args:
            array: [*leading, ...] values of the leaf.
        """
        if not array.size:
            return None
        if isinstance(self.first, int) and array.min() >= self.first and array.max() <= self.last:
            return None
        beyond = (array < self.first) | (array > self.last)  # [*leading, ...]
        if not beyond.any():
            return None
        return tuple(int(each) for each in np.unravel_index(beyond.argmax(), beyond.shape))

    def describe(self, number: Any) -> str:
        """Describe a number outside the space, for a message."""
        at = f" at {path_name(self.path)}" if self.path else ""
        return f"{at} holds {number}, which is not in its space {self.space}"

    def require(self, array: NDArray[Any]) -> None:
        """Raise OutsideSpace if values [B, ...] are outside the space."""
        if (found := self.outside(array)) is not None:
            raise OutsideSpace(found[0], self.describe(array[found]))


def choices_of(leaves: Iterable[tuple[Path, Space[Any]]]) -> list[Choice]:
    """Select the Discrete, MultiDiscrete and MultiBinary leaves of a space."""
    bounds = ((path, space, *bounds_of_choices(space)) for path, space in leaves)
    return [Choice(*each) for each in bounds if each[2] is not None]


def find_outside(choices: Iterable[Choice], tree: Any) -> tuple[tuple[int, ...], str] | None:
    """Find a tree's first number outside its space: index and reason.

    Args:
        choices: the choices of the tree's space.
        tree: [*leading, ...] values.
    """
    for choice in choices:
        array: Any = tree
        for key in choice.path:
            array = array[key]
        if (found := choice.outside(array)) is not None:
            return found, choice.describe(array[found])
    return None


def bounds_of_choices(space: Space[Any]) -> tuple[Any, Any]:
    """Return min and max of a Discrete, MultiDiscrete or MultiBinary space.

    For any other space, both are None.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    return None, None


_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

#: For fewer places than this, writing them as items is slower.
_MANY = 128

_REASONS: list[tuple[type[Space[Any]], str]] = [
    (spaces.Text, "its values are strings of varying length: give their characters as numbers"),
    (spaces.Graph, "its values vary in size: pad nodes and edges to their maximum"),
    (spaces.Sequence, "its values vary in length: pad them to the maximum length"),
    (spaces.OneOf, "its values change their kind: give all of its spaces in a Tuple"),
]


def space_leaves(space: Space[Any], path: Path = ()) -> list[tuple[Path, Space[Any]]]:
    """Return the spaces within a space whose values are one array each.

    With their paths in trees of the space.

    Args:
        space: Box, Discrete, MultiDiscrete or MultiBinary, which have one entry with the path ();
            or a Dict or Tuple of these, nested to any depth.
        path: of the space, within another one.

    Raises:
        UnsupportedSpace: there is no encoding for this space, or for one within it.
    """
    if isinstance(space, _LEAVES):
        return [(path, space)]
    children = _children(space)
    if children is None:
        raise unsupported(space, path)
    if not children:
        raise UnsupportedSpace(f"{_name(space, path)} has nothing in it: leave it out")
    for key in children:
        if not isinstance(key, str):
            raise UnsupportedSpace(
                f"{_name(space, path)} has the key {key!r}: keys must be strings"
            )
    return [leaf for key, child in children.items() for leaf in space_leaves(child, (*path, key))]


def zeros(space: Space[Any], leading_shape: Sequence[int] = ()) -> Tree:
    """Make zeros [*leading_shape, ...] with a space's shapes and dtypes.

    Its values are 0, or the start of Discrete and MultiDiscrete spaces that count from another
    number.

    Raises:
        UnsupportedSpace: as for `space_leaves`.
    """
    children = _children(space)
    if children is not None:
        return {key: zeros(child, leading_shape) for key, child in children.items()}
    if not isinstance(space, _LEAVES):
        raise unsupported(space, ())
    array = np.zeros((*leading_shape, *(space.shape or ())), space.dtype)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        array += space.start
    return array


def to_tree(space: Space[Any], value: Any) -> Tree:
    """Convert a value or a batch of a space to a tree.

    Nothing is copied.
    """
    if isinstance(space, spaces.Dict):
        return {key: to_tree(child, value[key]) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): to_tree(child, value[i]) for i, child in enumerate(space.spaces)}
    array: Tree = value
    return array


def from_tree(space: Space[Any], tree: Any) -> Any:
    """Convert a tree to a space's value, as Gymnasium expects it.

    Nothing is copied.
    """
    if isinstance(space, spaces.Dict):
        return {key: from_tree(child, tree[key]) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(from_tree(child, tree[str(i)]) for i, child in enumerate(space.spaces))
    return tree


def tree_map(function: Callable[..., Any], tree: Any, *trees: Any) -> Any:
    """Apply a function to the leaves of one or more trees.

    Args:
        function: called with the leaves at the same path, one from each tree.
        tree: gives branches and keys of the result.
        trees: have at least these branches and keys.
    """
    if isinstance(tree, np.ndarray):  # this check is faster than the next one
        return function(tree, *trees)
    if isinstance(tree, Mapping):
        return {
            key: tree_map(function, child, *(other[key] for other in trees))
            for key, child in tree.items()
        }
    return function(tree, *trees)


def tree_leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves (arrays or tensors) of a tree with their paths."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key, branch in tree.items():
        yield from tree_leaves(branch, (*path, key))


def first_leaf(tree: Any) -> Any:
    """Return the first leaf of a tree."""
    while isinstance(tree, Mapping):
        tree = next(iter(tree.values()))
    return tree


def grown(tree: Any, capacity: int) -> Any:
    """Extend a tree of arrays [S, ...] with zeros to [capacity, ...]."""

    def more(array: NDArray[Any]) -> NDArray[Any]:
        room = np.zeros((capacity, *array.shape[1:]), array.dtype)
        room[: len(array)] = array
        return room

    return tree_map(more, tree)


def room_for(tree: Any, capacity: int) -> Any:
    """Make zeros [capacity, ...] for rows like a tree's [B, ...]."""
    return tree_map(
        lambda array: np.zeros((capacity, *array.shape[1:]), array.dtype),
        tree,
    )


def take(tree: Any, places: Any) -> Any:
    """Copy places [B] of a tree [S, ...] to [B, ...].

    Returns views if the places are a slice.
    """
    if isinstance(tree, np.ndarray):
        if isinstance(places, np.ndarray):  # this is several times as fast as tree[places]
            return tree.take(places.nonzero()[0] if places.dtype == np.bool_ else places, 0)
        return tree[places]
    return {key: take(branch, places) for key, branch in tree.items()}


def put(tree: Any, places: Any, values: Any) -> None:
    """Write [B, ...] into places [B] of a tree [S, ...]."""
    if isinstance(tree, np.ndarray):
        if tree.ndim > 1 and isinstance(places, np.ndarray) and len(places) >= _MANY:
            tree, values = _items(tree, values)
        tree[places] = values
    else:
        for key, branch in tree.items():
            put(branch, places, values[key])


def _items(tree: NDArray[Any], values: Any) -> tuple[NDArray[Any], Any]:
    """View arrays with one item [S] and [B] per place.

    NumPy writes many items several times as fast. Other arrays are returned unchanged.
    """
    if not (
        isinstance(values, np.ndarray)
        and values.dtype == tree.dtype
        and values.shape[1:] == tree.shape[1:]
        and tree.flags.c_contiguous
        and values.flags.c_contiguous
        and tree.size
        and values.size
    ):
        return tree, values
    item = f"V{tree.nbytes // len(tree)}"
    of_tree = tree.reshape(len(tree), -1).view(item)[:, 0]  # [S]
    return of_tree, values.reshape(len(values), -1).view(item)[:, 0]  # [B]


def _children(space: Space[Any]) -> dict[str, Space[Any]] | None:
    """Return spaces directly within a space, by key.

    None: no spaces within.
    """
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return {str(i): child for i, child in enumerate(space.spaces)}
    return None


def unsupported(space: Space[Any], path: Path) -> UnsupportedSpace:
    """Make an error for a space without encoding, with an alternative."""
    reasons = (reason for kind, reason in _REASONS if isinstance(space, kind))
    served = ", ".join(kind.__name__ for kind in _LEAVES)
    why = next(reasons, f"express it with {served}, Dict and Tuple")
    return UnsupportedSpace(f"there is no encoding for {_name(space, path)}: {why}")


def _name(space: Space[Any], path: Path) -> str:
    at = f" at {path_name(path)}" if path else ""
    return f"the space {space}{at}"


def has_bounds(space: spaces.Box) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks [...] of a Box's numbers with bounds.

    1e30 is not a bound.
    """
    low, high = (np.asarray(x, np.float64) for x in (space.low, space.high))  # [...] both
    return np.asarray(low > -1e30), np.asarray(high < 1e30)


def two_bounds(space: spaces.Box) -> NDArray[np.bool_]:
    """Return a mask [...] of a Box's numbers with two bounds."""
    return np.logical_and(*has_bounds(space))
