"""A learner that begins with weights from elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from juggler.learner.gradient_core import GradientCore
from juggler.learner.learner import Learner
from juggler.learner.state import StateMismatch
from juggler.runtime.episodes.batch import DEFAULT_MODULE
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.trees import Tree


def begin_with(learner: Learner, weights: Tree, seed: int) -> None:
    """Give the module "default" these parameters and buffers.

    Those that are not named stay as they are, such as a value function's, which nobody needs to
    act. The optimizer, what the algorithm keeps, and the counts begin anew.

    Args:
        learner: of one module, fresh.
        weights: name -> array, as in `Learner.get_weights`.
        seed: of what the algorithm keeps.

    Raises:
        StateMismatch: the module has no such parameter or buffer; the learner is as it was.
    """
    if not isinstance(weights, dict) or not isinstance(learner.core, GradientCore):
        raise StateMismatch(f"{learner.core.name} cannot begin with these weights")
    tree, extra = learner.save()
    unit: dict[str, Any] = dict(tree[DEFAULT_MODULE])
    own: dict[str, dict[str, Any]] = {part: dict(unit[part]) for part in ("parameters", "buffers")}
    names = {name: part for part, arrays in own.items() for name in arrays}
    for name, array in weights.items():
        if name not in names:
            raise StateMismatch(f"the module has no weights {name!r}{nearest(name, names)}")
        if not isinstance(array, np.ndarray) or array.shape != own[names[name]][name].shape:
            raise StateMismatch(f"weights {name!r} are of another shape than the module's")
        own[names[name]][name] = array
    learner.restore({**tree, DEFAULT_MODULE: {**unit, **own}}, extra)
    state = learner.state[DEFAULT_MODULE]
    state["extra"] = {
        name: x.to(learner.device)
        for name, x in learner.core.initial_extra(state["parameters"], seed).items()
    }
