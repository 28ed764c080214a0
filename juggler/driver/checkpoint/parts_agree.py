"""Whether modules agree on the parts that they share, in weights that were saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError
from juggler.runtime.checkpoints.weights import Weights, is_named, weights_of


def different_parts(
    weights: Weights, shared: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, str]]:
    """Yield the names of parameters and buffers that modules share and have different values of,
    with the ids of two such modules.

    Args:
        weights: by module id; what a module lacks is not compared.
        shared: by pattern of names, the modules that share what it matches.
    """
    for pattern, module_ids in shared.items():
        first: dict[str, str] = {}
        for module_id in module_ids:
            for name, array in weights.get(module_id, {}).items():
                if not is_named(pattern, f"{module_id}:{name}"):
                    continue
                before = first.setdefault(name, module_id)
                if not np.array_equal(weights[before][name], array):
                    yield name, before, module_id


def shared_parts_must_agree(checkpoint: Checkpoint, shared: Mapping[str, Sequence[str]]) -> None:
    """Check that modules which share parts have the same values of them.

    Raises:
        CheckpointError: they have not; names the parameter and two modules.
    """
    if not shared:
        return
    for name, one, other in different_parts(weights_of(checkpoint), shared):
        raise CheckpointError(
            checkpoint.path or Path("in memory"),
            f"has different values of {name!r} for modules {one!r} and {other!r}, which share it: "
            "resume from an earlier checkpoint",
        )
