"""Weights of checkpoints, to start from or only to play with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.checkpoints.checkpoint import CONNECTORS, Checkpoint, CheckpointError, read
from juggler.runtime.wire.trees import Tree, leaves

#: Arrays by the names of parameters and buffers, by module id.
Weights = dict[str, dict[str, NDArray[Any]]]
#: Key in the state of a parameter group: parameters for acting, if they differ from the trained
#: ones.
ACTING: Final = "acting"


class NoSuchWeights(ValueError):
    """A pattern matches no parameter; the error lists what exists."""


def read_weights(checkpoint: str | Path, parameters: Sequence[str] = ()) -> Weights:
    """Read the trained parameters and buffers of a checkpoint.

    Args:
        checkpoint: its directory, or a run directory, whose newest good checkpoint is read.
        parameters: patterns of names with `*`, `?` and `[...]`, as in `optimizers`; none: all.

    Returns:
        Arrays by name, by module id, as for `Learner.set_weights`, `LearnerGroup.set_weights` and
            `LearnerGroup.add_module`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it has no weights by name.
        NoSuchWeights: a pattern matches nothing in it.
    """
    return weights_of(read(checkpoint), parameters)


def weights_of(
    checkpoint: Checkpoint, parameters: Sequence[str] = (), *, acting: bool = False
) -> Weights:
    """Return the weights of a checkpoint in memory, optionally for acting."""
    found = weights_in(checkpoint.tree, acting=acting)
    if not found:
        where = checkpoint.path or Path("in memory")
        raise CheckpointError(where, "has no named parameters to start from")
    if not parameters:
        return found
    names = [f"{module_id}:{name}" for module_id, arrays in found.items() for name in arrays]
    for pattern in parameters:
        if not any(is_named(pattern, name) for name in names):
            short = [name.partition(":")[2] for name in names] if len(found) == 1 else names
            raise NoSuchWeights(
                f"no parameter has a name like {pattern!r}; there are {', '.join(short)}"
            )
    # Modules without a match are left out, and keep their own weights.
    chosen = {
        module_id: {
            name: array
            for name, array in arrays.items()
            if any(is_named(pattern, f"{module_id}:{name}") for pattern in parameters)
        }
        for module_id, arrays in found.items()
    }
    return {module_id: arrays for module_id, arrays in chosen.items() if arrays}


def weights_in(tree: Mapping[str, Any], *, acting: bool = False) -> Weights:
    """Return parameters and buffers in learners' states, trained or for acting."""
    found: Weights = {}
    for unit_id, unit in tree.items():
        if not isinstance(unit, Mapping) or not isinstance(unit.get("parameters"), Mapping):
            continue  # the state of connectors or of a user's core
        trained = {**unit["parameters"], **unit.get("buffers", {})}
        for full, array in (acting_arrays(unit) if acting else trained).items():
            # Parts that modules share belong to the first module that has them.
            module_id, _, name = full.rpartition(":")
            found.setdefault(module_id or unit_id, {})[name] = array
    return found


def acting_arrays(unit: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters and buffers for acting, from a module's training state.

    Raises:
        KeyError: there are none.
    """
    return {**(unit.get(ACTING) or unit["parameters"]), **unit.get("buffers", {})}


def is_named(pattern: str, full: str) -> bool:
    """Return whether a pattern matches "module:parameter", or any module's parameter."""
    return fnmatchcase(full, pattern) or fnmatchcase(full.partition(":")[2], pattern)


#: Keys in the table of a module that only plays.
TRAIN: Final = "train"
FROM: Final = "from"
DIGEST: Final = "digest"
#: The directory within a run's with a checkpoint for each of these modules.
DIRECTORY: Final = "frozen"
#: Branches of these checkpoints: arrays by name, and the connectors' state.
WEIGHTS: Final = "weights"


def tree_digest(tree: Tree) -> str:
    """Return the SHA-256 of a tree's names, dtypes, shapes and numbers."""
    total = hashlib.sha256()
    for path, array in sorted(leaves(tree), key=lambda leaf: leaf[0]):
        what = (path, None) if array is None else (path, str(array.dtype), array.shape)
        total.update(repr(what).encode())
        if array is not None:
            total.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return total.hexdigest()


def playing_tree(checkpoint: Checkpoint, module_id: str) -> dict[str, Tree]:
    """Return the weights and connectors' state of a checkpoint's module.

    Raises:
        CheckpointError: it has no weights by name.
    """
    weights = weights_of(checkpoint, acting=True).get(module_id)
    if weights is None:
        where = checkpoint.path or Path("in memory")
        raise CheckpointError(where, f"has no weights of module {module_id!r}")
    return {WEIGHTS: dict(weights), CONNECTORS: checkpoint.learned_of(module_id)}


def playing_trees(checkpoint: Checkpoint) -> dict[str, dict[str, Tree]]:
    """Return acting weights of all trained modules, by module id.

    Modules without named weights are left out.
    """
    states = {module_id: checkpoint.tree.get(module_id) for module_id in checkpoint.module_ids}
    return {
        module_id: {
            WEIGHTS: acting_arrays(state),
            CONNECTORS: checkpoint.learned_of(module_id),
        }
        for module_id, state in states.items()
        if isinstance(state, Mapping) and isinstance(state.get("parameters"), Mapping)
    }


def place_and_module(text: str) -> tuple[Path, str | None] | None:
    """Parse "PATH" or "PATH:MODULE"; None if the path does not exist."""
    path, _, module_id = text.rpartition(":")
    if Path(text).exists():
        return Path(text), None
    return (Path(path), module_id) if path and Path(path).exists() else None


def is_frozen(table: object) -> bool:
    """Return whether a module is frozen, from its table in a configuration."""
    return isinstance(table, Mapping) and table.get(TRAIN, True) is False


def run_of(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint's run, if it was not moved."""
    return checkpoint.resolve().parent.parent


def module_in(checkpoint: Checkpoint, wanted: str | None = None) -> tuple[Checkpoint, str]:
    """Find the checkpoint with a module's weights, and its id there.

    The weights of a frozen module are in the directory of the run or, if the checkpoint was moved,
    at their origin.

    Args:
        checkpoint: of the run.
        wanted: the id of the module; None: the only trained module.

    Raises:
        CheckpointError: there is no such module, or its weights are missing.
    """
    table: Any = checkpoint.config.get("modules", {}).get(wanted, {})
    if not is_frozen(table):
        return checkpoint, checkpoint.module_id(wanted)
    where = checkpoint.path or Path("in memory")
    kept = run_of(where) / DIRECTORY / str(wanted)
    if kept.is_dir():
        return read_module(str(kept))
    # A checkpoint moved away from its run: the weights may still be at their origin.
    try:
        found = read_module(table[FROM])
        if (digest := tree_digest(playing_tree(*found))) != table.get(DIGEST, digest):
            raise CheckpointError(Path(table[FROM]), "its weights have changed")
        return found
    except CheckpointError as error:
        raise CheckpointError(
            where,
            f"module {wanted!r} was not trained, and its weights are neither in {kept} nor "
            f"at their origin: {error}",
        ) from error


def read_module(text: str) -> tuple[Checkpoint, str]:
    """Read the module at "PATH" or "PATH:MODULE".

    Returns:
        The checkpoint with its weights, and its id there.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, it has no such module, or it has
            several and none is named.
    """
    place, module_id = place_and_module(text) or (Path(text), None)
    return module_in(read(place), module_id)
