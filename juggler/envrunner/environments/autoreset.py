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
    finals, shown, why = infos.get("final_obs"), None, ""
    try:
        if isinstance(finals, (Mapping, tuple)):
            of_row = tree_map(lambda leaf: leaf[row], to_tree(space, finals))
            shown = from_tree(space, of_row)
        elif finals is not None and row < len(finals):
            shown = finals[row]
        if shown is not None:
            why = misfit(space, shown)
    except (LookupError, TypeError) as error:
        why = f"its observation has other parts than {space}: {type(error).__name__}: {error}"
    if shown is not None and not why:
        return to_tree(space, shown)
    # No value is bootstrapped from it.
    if terminated:
        return None
    missing = (
        "it truncated an episode under SAME_STEP autoreset without infos['final_obs'], "
        "which the value of the last step is bootstrapped from"
    )
    reason = f"at the end of a truncated episode, {why}" if why else missing
    raise EnvironmentFailed(f"environment {row}", "step", reason)
