"""Named trees of arrays: an array, or a map from string keys to trees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.errors import WireError

#: An array, or a branch. Branches that come from the wire are dicts.
Tree: TypeAlias = "NDArray[Any] | Mapping[str, Tree]"

#: The keys from the root of a tree down; empty at the root.
Path: TypeAlias = tuple[str, ...]


def leaves(tree: object, path: Path = ()) -> Iterator[tuple[Path, NDArray[Any] | None]]:
    """Every array of a tree with its path, and None with the path of every branch without any.

    Depth first, in the order of the branches' keys.

    Raises:
        WireError: something in the tree is neither array nor branch, or a key is not a string.
    """
    if isinstance(tree, np.ndarray):
        yield path, tree
    elif not isinstance(tree, Mapping):
        kind = type(tree).__name__
        raise WireError(f"a tree holds arrays and branches, but {path_name(path)} is a {kind}")
    elif not tree:
        yield path, None
    else:
        for key, child in tree.items():
            if not isinstance(key, str):
                raise WireError(f"keys of a tree are strings, but {path_name(path)} has {key!r}")
            yield from leaves(child, (*path, key))


def flatten(tree: Tree) -> list[tuple[Path, NDArray[Any]]]:
    """The arrays of a tree with their paths, as `leaves` orders them; no empty branches.

    Raises:
        WireError: as `leaves`.
    """
    return [(path, array) for path, array in leaves(tree) if array is not None]


def unflatten(
    arrays: Iterable[tuple[Path, NDArray[Any]]], empty_branches: Iterable[Path] = ()
) -> Tree:
    """The tree with these arrays and these branches that hold nothing.

    Raises:
        WireError: the paths are not those of one tree.
    """
    arrays, empty_branches = list(arrays), list(empty_branches)
    check_paths([*(path for path, _ in arrays), *empty_branches])
    if arrays and not arrays[0][0]:
        return arrays[0][1]
    root: dict[str, Any] = {}
    for path, array in arrays:
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = array
    for path in empty_branches:
        branch = root
        for key in path:
            branch = branch.setdefault(key, {})
    return root


def check_paths(paths: Iterable[Path]) -> None:
    """Whether the paths of arrays and empty branches are those of one tree.

    Raises:
        WireError: there is no path, one comes twice, or one leads through the end of another.
    """
    ends: set[Path] = set()
    branches: set[Path] = set()
    for path in paths:
        if path in ends:
            raise WireError(f"the tree has {path_name(path)} twice")
        ends.add(path)
        while path and (path := path[:-1]) not in branches:
            branches.add(path)
    if not ends:
        raise WireError("the tree names neither an array nor an empty branch")
    if both := ends & branches:
        name = path_name(min(both))
        raise WireError(f"the tree has {name} both as a branch and as an array or empty branch")


def path_name(path: Path) -> str:
    """A path for people, on one line and of bounded length."""
    name = repr("/".join(path)) if path else "the root"
    return name if len(name) <= 100 else f"{name[:90]}…{name[-9:]}"
