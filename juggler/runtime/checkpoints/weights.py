"""The weights in a checkpoint, for a run or a script's learner to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read

#: Arrays by the names of parameters and buffers, by module id.
Weights = dict[str, dict[str, NDArray[Any]]]
#: In the state of a parameter group, the parameters to act with, where others are trained.
ACTING: Final = "acting"


class NoSuchWeights(ValueError):
    """A pattern matches no parameter of a checkpoint; says which parameters there are."""


def read_weights(checkpoint: str | Path, parameters: Sequence[str] = ()) -> Weights:
    """The parameters and buffers in a checkpoint, as they were trained.

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
    """The same as `read_weights`, for a checkpoint in memory; or with the parameters to act with,
    where these are not the trained ones."""
    found = weights_in(checkpoint.tree, acting=acting)
    if not found:
        where = checkpoint.path or Path("in memory")
        raise CheckpointError(where, "has no parameters by name that could be begun with")
    if not parameters:
        return found
    names = [f"{module_id}:{name}" for module_id, arrays in found.items() for name in arrays]
    for pattern in parameters:
        if not any(is_named(pattern, name) for name in names):
            short = [name.partition(":")[2] for name in names] if len(found) == 1 else names
            raise NoSuchWeights(
                f"no parameter has a name like {pattern!r}; there are {', '.join(short)}"
            )
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
    """The parameters and buffers in the states of learners: those that are trained, or those to act
    with."""
    found: Weights = {}
    for module_id, name, array in _weights(tree, acting=acting):
        found.setdefault(module_id, {})[name] = array
    return found


def acting_arrays(unit: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters to act with, and the buffers, in the state of a parameter group.

    Raises:
        KeyError: it has none.
    """
    return {**(unit.get(ACTING) or unit["parameters"]), **unit.get("buffers", {})}


def is_named(pattern: str, full: str) -> bool:
    """Whether a pattern matches "module:parameter", or the parameter of any module."""
    return fnmatchcase(full, pattern) or fnmatchcase(full.partition(":")[2], pattern)


def _weights(tree: Mapping[str, Any], *, acting: bool) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """(module id, name, array) of every parameter and buffer; shared ones belong to the first
    module that has them."""
    for unit_id, unit in tree.items():
        if not isinstance(unit, Mapping) or not isinstance(unit.get("parameters"), Mapping):
            continue  # what connectors have learned, or what a core of somebody's own keeps
        trained = {**unit["parameters"], **unit.get("buffers", {})}
        for full, array in (acting_arrays(unit) if acting else trained).items():
            module_id, _, name = full.rpartition(":")
            yield module_id or unit_id, name, array
