"""When a vector of environments resets them, and what it then says of the episodes that ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.wire.structures import to_tree, tree_map
from juggler.runtime.wire.trees import Tree


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """When the environments of a vector are reset.

    Raises:
        ValueError: it does not say.
    """
    try:
        return AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError:
        raise ValueError(
            f"{env} must say in metadata['autoreset_mode'] when it resets environments, as a "
            f"gymnasium.vector.AutoresetMode, not {env.metadata.get('autoreset_mode')!r}"
        ) from None


def final_observation(space: gymnasium.Space[Any], infos: dict[str, Any], row: int) -> Tree:
    """The last observation of an episode that ended and was reset within one step.

    Args:
        space: of one environment's observations.
        infos: of that step. "final_obs" holds an observation for each environment, or is a batch
            of observations.
        row: the environment.

    Raises:
        EnvironmentFailed: it is not there.
    """
    finals = infos.get("final_obs")
    if isinstance(finals, (Mapping, tuple)):
        of_row: Tree = tree_map(lambda leaf: leaf[row], to_tree(space, finals))
        return of_row
    if finals is None or finals[row] is None:
        raise EnvironmentFailed(
            f"environment {row}",
            "step",
            "it truncated an episode under SAME_STEP autoreset, and its infos have no "
            "'final_obs', which is what to bootstrap from",
        )
    return to_tree(space, finals[row])
