"""Parts of infos that a vector's step passes on. No torch here.

These are action masks, numbers, and the end of an episode. Nothing reads the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from juggler.envrunner.info_numbers import NUMBERS, keep_numbers
from juggler.runtime.modules.columns import ACTION_MASK


class NoInfo(TypeError):
    """The info is not a dict.

    A `reset` that only returns an observation [2] looks like this.
    """


class BadMask(ValueError):
    """The action mask in an info differs from other environments' masks."""


def mask_in(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action mask of an info, if it has one."""
    if not isinstance(info, Mapping):
        raise NoInfo(f"its info is of type {type(info).__name__}")
    return {ACTION_MASK: info[ACTION_MASK]} if ACTION_MASK in info else {}


def add_mask(
    env: VectorEnv[Any, Any, Any], infos: dict[str, Any], info: Mapping[str, Any], row: int
) -> dict[str, Any]:
    """Add the action mask of an info, if it has one.

    Raises:
        BadMask: the masks of other environments have another shape or type.
    """
    part, others = mask_in(info), infos.get(ACTION_MASK)
    try:
        if part and isinstance(others, np.ndarray) and others.dtype != object:
            size, due = np.size(part[ACTION_MASK]), others[0].size
            if size != due:  # NumPy might broadcast a single number
                raise ValueError(f"{size} numbers instead of {due}")
        return env._add_info(infos, part, row)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        reason = f"the action mask in its info is not like those of other environments: {error}"
        raise BadMask(reason) from None


def without_mask(info: dict[str, Any]) -> dict[str, Any]:
    """Remove the action mask from the info of a terminating step.

    Nothing reads the mask, and Gymnasium cannot pack masks of different kinds.
    """
    if not isinstance(info, Mapping) or ACTION_MASK not in info:
        return info
    return {name: value for name, value in info.items() if name != ACTION_MASK}


def add_final(
    env: VectorEnv[Any, Any, Any],
    infos: dict[str, Any],
    observation: Any,
    info: Mapping[str, Any],
    row: int,
) -> dict[str, Any]:
    """Add the last observation and info before a SAME_STEP reset."""
    final = {"final_obs": observation, "final_info": mask_in(info)}
    infos = env._add_info(infos, deepcopy(final), row)  # the reset may write into the same memory
    keep_numbers(infos["final_info"], info, row, env.num_envs)
    return infos


def keep_own_finals(env: VectorEnv[Any, Any, Any]) -> None:
    """Let Gymnasium's SyncVectorEnv copy last observations before the reset overwrites them."""
    vector = env.unwrapped
    if not isinstance(vector, SyncVectorEnv):
        return
    add: Any = vector._add_info

    def add_own(infos: dict[str, Any], info: dict[str, Any], row: int) -> dict[str, Any]:
        if "final_obs" in info and "final_info" in info:
            final = {**info["final_info"], **deepcopy(mask_in(info["final_info"]))}
            info = {**info, "final_obs": deepcopy(info["final_obs"]), "final_info": final}
        added: dict[str, Any] = add(infos, info, row)
        return added

    vars(vector)["_add_info"] = add_own


def kept_of(info: dict[str, Any], *, terminated: bool = False) -> dict[str, Any]:
    """Return the parts of an info of Gymnasium's worker to pass on.

    Args:
        info: of a step.
        terminated: whether the step terminated an episode.
    """
    is_reset = "final_obs" in info and "final_info" in info  # the info is of the next episode
    part = mask_in(without_mask(info) if terminated and not is_reset else info)
    part |= {name: value for name, value in info.items() if isinstance(value, NUMBERS)}
    if is_reset:
        final = kept_of(info["final_info"], terminated=terminated)
        part |= {"final_obs": info["final_obs"], "final_info": final}
    return part


def add_kept(
    env: VectorEnv[Any, Any, Any], infos: dict[str, Any], part: dict[str, Any], row: int
) -> dict[str, Any]:
    """Add the result of `kept_of` of one environment."""
    if "final_info" in part:
        infos = add_final(env, infos, part["final_obs"], part["final_info"], row)
    else:
        keep_numbers(infos, part, row, env.num_envs)
    return add_mask(env, infos, part, row) if ACTION_MASK in part else infos
