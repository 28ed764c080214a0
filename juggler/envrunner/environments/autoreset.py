"""Autoreset modes of vectors, and the last observations of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from juggler.envrunner.environments.misfits import misfit
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.wire.structures import from_tree, to_tree, tree_map
from juggler.runtime.wire.trees import Tree


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return a vector's autoreset mode.

    Raises:
        ValueError: its metadata has no mode.
    """
    try:
        return AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError:
        raise ValueError(
            f"{env}: metadata['autoreset_mode'] must be a gymnasium.vector.AutoresetMode, "
            f"not {env.metadata.get('autoreset_mode')!r}"
        ) from None


def last_observation(
    space: gymnasium.Space[Any], infos: dict[str, Any], row: int, *, terminated: bool = False
) -> Tree | None:
    """Return the last observation of an episode that a SAME_STEP vector ended.

    Args:
        infos: of that step. "final_obs" is an array [N] of observations, or a batch [N, ...] of
            them.
        terminated: the episode has terminated: an observation that is missing or does not fit the
            space is None. Otherwise it was truncated.

    Raises:
        EnvironmentFailed: a truncated episode has none in the infos, or it does not fit the space.
    """
    if _has_final_observation(infos, row):
        shown, why = _final_of(space, infos, row)
        reason = f"at the end of a truncated episode, {why}" if why else ""
    else:
        shown, reason = (
            None,
            (
                "it truncated an episode under SAME_STEP autoreset without infos['final_obs'], "
                "which the value of the last step is bootstrapped from"
            ),
        )
    if not reason:
        return to_tree(space, shown)
    # No value is bootstrapped from it.
    if terminated:
        return None
    raise EnvironmentFailed(f"environment {row}", "step", reason)


def _has_final_observation(infos: Mapping[str, Any], row: int) -> bool:
    finals = infos.get("final_obs")
    if finals is None or isinstance(finals, (Mapping, tuple)):
        return finals is not None
    if not hasattr(finals, "__len__"):
        return True  # such as one number, which `_final_of` rejects
    return row < len(finals) and finals[row] is not None


def _final_of(space: gymnasium.Space[Any], infos: Mapping[str, Any], row: int) -> tuple[Any, str]:
    """Return an environment's part of "final_obs", and its error or ""."""
    shown = infos["final_obs"]
    try:
        if isinstance(shown, (Mapping, tuple)):
            of_row = tree_map(lambda leaf: leaf[row], to_tree(space, shown))
            shown = from_tree(space, of_row)
        else:
            shown = shown[row]
    except (LookupError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        return None, f"its observation has other parts than {space}: {what}"
    return shown, misfit(space, shown)
