"""Modules that play and are not trained: where their weights are, and how they are told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from juggler.runtime.checkpoints.checkpoint import CONNECTORS, Checkpoint, CheckpointError, read
from juggler.runtime.checkpoints.weights import acting_arrays, weights_of
from juggler.runtime.wire.trees import Tree, leaves

#: Keys of the table of such a module.
TRAIN: Final = "train"
FROM: Final = "from"
DIGEST: Final = "digest"
#: The directory in a run's with a checkpoint for each such module.
DIRECTORY: Final = "frozen"
#: The arrays by name that such a module plays with; CONNECTORS is what its connectors had learned.
WEIGHTS: Final = "weights"


def tree_digest(tree: Tree) -> str:
    """The SHA-256 of names, dtypes, shapes and numbers, whatever their order in the tree."""
    total = hashlib.sha256()
    for path, array in sorted(leaves(tree), key=lambda leaf: leaf[0]):
        what = (path, None) if array is None else (path, str(array.dtype), array.shape)
        total.update(repr(what).encode())
        if array is not None:
            total.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return total.hexdigest()


def playing_tree(checkpoint: Checkpoint, module_id: str) -> dict[str, Tree]:
    """All that a module of a checkpoint plays with.

    Raises:
        CheckpointError: it has no weights by name.
    """
    weights = weights_of(checkpoint, acting=True).get(module_id)
    if weights is None:
        where = checkpoint.path or Path("in memory")
        raise CheckpointError(where, f"has no weights of module {module_id!r}")
    return {WEIGHTS: dict(weights), CONNECTORS: checkpoint.learned_of(module_id)}


def playing_trees(checkpoint: Checkpoint) -> dict[str, dict[str, Tree]]:
    """By module id, all that the modules which are trained play with. Those that have no weights by
    name are left out."""
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
    """What "PATH" or "PATH:MODULE" means, if there is something at the path: the path, and the
    module that was named."""
    path, _, module_id = text.rpartition(":")
    if Path(text).exists():
        return Path(text), None
    return (Path(path), module_id) if path and Path(path).exists() else None


def is_frozen(table: object) -> bool:
    """Whether a module is not trained, by its table in a configuration."""
    return isinstance(table, Mapping) and table.get(TRAIN, True) is False


def run_of(checkpoint: Path) -> Path:
    """The directory of the run that a checkpoint is in, if it was not moved."""
    return checkpoint.resolve().parent.parent


def module_in(checkpoint: Checkpoint, wanted: str | None = None) -> tuple[Checkpoint, str]:
    """A module of a run: the checkpoint that has its weights, and its id there.

    Those of a module that is not trained are in the directory of the run; or, if the checkpoint was
    moved, where the run had them from.

    Args:
        checkpoint: of the run.
        wanted: the id of the module; None: the only one that is trained.

    Raises:
        CheckpointError: there is no such module, or its weights are gone.
    """
    table: Any = checkpoint.config.get("modules", {}).get(wanted, {})
    if not is_frozen(table):
        return checkpoint, checkpoint.module_id(wanted)
    where = checkpoint.path or Path("in memory")
    kept = run_of(where) / DIRECTORY / str(wanted)
    if kept.is_dir():
        return read_module(str(kept))
    try:
        found = read_module(table[FROM])
        if (digest := tree_digest(playing_tree(*found))) != table.get(DIGEST, digest):
            raise CheckpointError(Path(table[FROM]), "other weights are there now")
        return found
    except CheckpointError as error:
        raise CheckpointError(
            where,
            f"module {wanted!r} was not trained, and what it played with is neither in {kept} nor "
            f"where it came from: {error}",
        ) from error


def read_module(text: str) -> tuple[Checkpoint, str]:
    """A module of a checkpoint or run, as "PATH" or "PATH:MODULE" names it.

    Returns:
        The checkpoint that has its weights, and its id there.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it has no such module, or several
            where none is named.
    """
    place, module_id = place_and_module(text) or (Path(text), None)
    return module_in(read(place), module_id)
