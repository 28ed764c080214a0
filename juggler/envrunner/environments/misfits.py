"""Explains results that break the rules of Gymnasium and their spaces.

No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from juggler.runtime.wire.structures import space_leaves, to_tree, tree_map
from juggler.runtime.wire.trees import flatten, path_name

_RETURNED = {
    "reset": "(observation, info)",
    "step": "(observation, reward, terminated, truncated, info)",
}


def must_return(call: str, found: str) -> str:
    """Explain what "reset" or "step" must return instead of what was found."""
    return f"it must return {_RETURNED[call]}, as Gymnasium has it ({found})"


def no_reward(reward: Any, error: Exception) -> str:
    """Explain that a reward must be a number."""
    found, several = str(error), False
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        found, several = f"a {type(reward).__name__} of {len(reward)}", len(reward) > 1
    elif shape := getattr(reward, "shape", ()):
        several = math.prod(shape) != 1
        found = f"{reward.dtype} of shape {list(shape)}" + "; return its item()" * (not several)
    advice = "; if it has a reward for each agent, put 'tuples:' before its name in env" * several
    return f"it must return a number as the reward ({found})" + advice


def has_other_lengths(space: gymnasium.Space[Any], value: Any) -> bool:
    """Return whether tuples have another number of items than their spaces."""
    if isinstance(space, spaces.Tuple):
        items = space.spaces
        return len(value) != len(items) or any(map(has_other_lengths, items, value))
    if isinstance(space, spaces.Dict):
        return any(has_other_lengths(child, value[key]) for key, child in space.spaces.items())
    return False


def misfit(
    space: gymnasium.Space[Any],
    observation: Any,
    what: str = "observation",
) -> str:
    """Explain why a value does not fit its space; "": it fits."""
    if isinstance(observation, np.ndarray) and (
        (observation.shape, observation.dtype) == (space.shape, space.dtype)  # the usual case
    ):
        return ""
    if observation is None:
        return f"its {what} is None, where its {what}_space says {space}"
    try:
        if has_other_lengths(space, observation):
            return f"its {what} has other parts than {space}: a tuple of another length"
        arrays = dict(flatten(tree_map(np.asarray, to_tree(space, observation))))
    except Exception as error:
        return f"its {what} has other parts than {space}: {type(error).__name__}: {error}"
    # NumPy would broadcast or truncate what does not fit.
    for path, leaf in space_leaves(space):
        if path not in arrays:
            return f"its {what} has other parts at {path_name(path)} than {space}"
        array, dtype = arrays[path], np.dtype(leaf.dtype)
        if array.shape != leaf.shape or not np.can_cast(array.dtype, dtype, "same_kind"):
            part = f" at {path_name(path)}" if path else ""
            is_none = array.dtype == object and array.ndim == 0 and array.item() is None
            found = "None" if is_none else f"{array.dtype} of shape {list(array.shape)}"
            return f"its {what}{part} is {found}, where its {what}_space says {leaf}"
    return ""
