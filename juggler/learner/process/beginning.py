"""Begins training with weights from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from juggler.learner.learner import Learner
from juggler.runtime.wire.trees import Tree


def begin_with(
    learner: Learner, weights: Mapping[str, Tree], source: str, *, whole: bool, selectable: bool
) -> None:
    """Have a learner go on with weights from elsewhere.

    Args:
        learner: of one module.
        weights: name -> array by module id.
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
