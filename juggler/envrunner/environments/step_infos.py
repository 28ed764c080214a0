"""What a step of a vector tells of its environments' infos. No torch here.

These are action masks, numbers, and how an episode ended. Nobody reads the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.vector import VectorEnv

from juggler.envrunner.info_numbers import NUMBERS, keep_numbers
from juggler.runtime.modules.columns import ACTION_MASK


class NoInfo(TypeError):
    """The info is not a dict, for example because `reset` returned an observation [2] alone."""


def mask_in(info: dict[str, Any]) -> dict[str, Any]:
    """The action mask of an info, if it has one."""
    if not isinstance(info, dict):
        raise NoInfo(f"its info is of type {type(info).__name__}")
    return {ACTION_MASK: info[ACTION_MASK]} if ACTION_MASK in info else {}


def add_final(
    env: VectorEnv[Any, Any, Any],
    infos: dict[str, Any],
    observation: Any,
    info: dict[str, Any],
    row: int,
) -> dict[str, Any]:
    """Add the last observation and info of an episode that a SAME_STEP vector has reset."""
    final = {"final_obs": observation, "final_info": mask_in(info)}
    infos = env._add_info(infos, final, row)
    keep_numbers(infos["final_info"], info, row, env.num_envs)
    return infos


def told(info: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an info, as Gymnasium's worker sends it, that a vector tells of."""
    if not isinstance(info, dict):
        raise NoInfo(f"its info is of type {type(info).__name__}")
    part = {
        name: value
        for name, value in info.items()
        if name == ACTION_MASK or isinstance(value, NUMBERS)
    }
    if "final_obs" in info and isinstance(final := info.get("final_info"), dict):
        part |= {"final_obs": info["final_obs"], "final_info": told(final)}
    return part


def add_told(
    env: VectorEnv[Any, Any, Any], infos: dict[str, Any], part: dict[str, Any], row: int
) -> dict[str, Any]:
    """Add what `told` returned of one environment."""
    if "final_info" in part:
        infos = add_final(env, infos, part["final_obs"], part["final_info"], row)
    else:
        keep_numbers(infos, part, row, env.num_envs)
    return env._add_info(infos, mask_in(part), row) if ACTION_MASK in part else infos
