"""Begins training with weights from elsewhere, or goes on from a saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from juggler.learner.core.state import StateMismatch
from juggler.learner.learner import Learner
from juggler.runtime.wire.trees import Tree

#: What helps a run that cannot go on from its checkpoint.
REMEDY: Final = (
    "Restore the files and the settings that it was made with, or begin a new run with the "
    "parameters that still fit: --from and --from-parameters"
)


def go_on_with(learner: Learner, tree: Tree, extras: Mapping[str, Any], module_id: str) -> None:
    """Have a learner go on from a state that its run has saved.

    Raises:
        StateMismatch: it is of another network, optimizer, algorithm or pipeline.
    """
    try:
        learner.restore(tree, extras)
    except StateMismatch as error:
        raise StateMismatch(
            f"module {module_id!r}: the run cannot go on from its checkpoint: {error}. {REMEDY}"
        ) from error


def begin_with(
    learner: Learner, weights: Mapping[str, Tree], source: str, *, whole: bool, selectable: bool
) -> None:
    """Have a learner go on with weights from elsewhere.

    Args:
        learner: of one module.
        weights: name -> array.
        source: where they are from, for errors: a key with its value, or words.
        whole: whether missing weights are an error.
        selectable: the key `from_parameters` can have only some of them taken.

    Raises:
        ValueError: they do not fit the module.
    """
    try:
        learner.set_weights(weights, whole=whole)
    except ValueError as error:
        hint = ". They are of another network, or of other observations or actions" if whole else ""
        if whole and selectable:
            hint += ". To take only some, name them in from_parameters"
        raise ValueError(f"{source}: {error}{hint}") from error
