"""When a vector resets its environments, and the last observations of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from juggler.envrunner.environments.misfits import misfit
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.wire.structures import to_tree, tree_map
from juggler.runtime.wire.trees import Tree


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return when a vector resets its environments.

    Raises:
        ValueError: its metadata does not say.
    """
    try:
        return AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError:
        raise ValueError(
            f"{env}: metadata['autoreset_mode'] must be a gymnasium.vector.AutoresetMode, "
            f"not {env.metadata.get('autoreset_mode')!r}"
        ) from None


def final_observation(space: gymnasium.Space[Any], infos: dict[str, Any], row: int) -> Tree:
    """Return the last observation of an episode that a SAME_STEP vector has truncated and reset,
    or of another one that has one.

    Args:
        space: of one environment's observations.
        infos: of that step. "final_obs" is an array [N] of observations, or a batch [N, ...] of
            them.
        row: the environment's index.

    Raises:
        EnvironmentFailed: the infos do not have it.
    """
    if not _has_final_observation(infos, row):
        raise EnvironmentFailed(
            f"environment {row}",
            "step",
            "it truncated an episode under SAME_STEP autoreset without infos['final_obs'], "
            "which the value of the last step is bootstrapped from",
        )
    finals = infos["final_obs"]
    if isinstance(finals, (Mapping, tuple)):
        of_row: Tree = tree_map(lambda leaf: leaf[row], to_tree(space, finals))
        return of_row
    return to_tree(space, finals[row])


def last_observation(
    space: gymnasium.Space[Any], infos: dict[str, Any], row: int, *, terminated: bool
) -> Tree | None:
    """Return the last observation of an episode that a SAME_STEP vector has reset; None: the
    episode has terminated, and the vector gives none, or one that is not of the space.

    Raises:
        EnvironmentFailed: as `final_observation`, for an episode that was truncated.
    """
    if terminated:
        finals = infos.get("final_obs")
        batched = isinstance(finals, (Mapping, tuple))
        if finals is None or (not batched and misfit(space, finals[row])):
            return None
    return final_observation(space, infos, row)


def _has_final_observation(infos: Mapping[str, Any], row: int) -> bool:
    finals = infos.get("final_obs")
    return finals is not None and (isinstance(finals, (Mapping, tuple)) or finals[row] is not None)
