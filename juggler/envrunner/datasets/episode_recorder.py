"""Gathers whole episodes while a policy plays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.environments.autoreset import autoreset_mode, final_observation
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.wire.structures import to_tree, tree_map
from juggler.runtime.wire.trees import Tree


class EpisodeRecorder:
    """Hears of every step of a vector of environments.

    Args:
        env: N environments, with any autoreset mode.
        take: gets each episode when it ends.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], take: Callable[[RecordedEpisode], None]
    ) -> None:
        self._same_step = autoreset_mode(env) is AutoresetMode.SAME_STEP
        self._observed, self._acted = env.single_observation_space, env.single_action_space
        self._take = take
        # By row, of the running episode: observations, actions and rewards.
        self._running: list[tuple[list[Tree], list[Tree], list[float]]] = [
            ([], [], []) for _ in range(env.num_envs)
        ]
        self._before: Tree = {}

    def sees(self, observations: Any) -> None:
        """Hear of the observations [N, ...] that the next step is taken from."""
        # Environments may write the next ones into the same memory.
        self._before = tree_map(np.copy, to_tree(self._observed, observations))

    def step(
        self,
        actions: Any,
        rewards: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        observations: Any,
        infos: dict[str, Any],
        recorded: NDArray[np.bool_],
    ) -> None:
        """Hear of a step.

        Args:
            actions: what the environments got, [N, ...].
            rewards: [N], as the environments gave them; so are the next four.
            terminated: [N]
            truncated: [N]
            observations: [N, ...]
            infos: of the step.
            recorded: [N] whose steps belong to episodes that are recorded.
        """
        acted = to_tree(self._acted, actions)
        for row in np.flatnonzero(recorded).tolist():
            seen, chosen, got = self._running[row]
            seen.append(_row(self._before, row))
            chosen.append(_row(acted, row))
            got.append(float(rewards[row]))
            if not (terminated[row] or truncated[row]):
                continue
            if self._same_step:
                seen.append(tree_map(np.array, final_observation(self._observed, infos, row)))
            else:
                seen.append(_row(to_tree(self._observed, observations), row))
            self._running[row] = [], [], []
            episode = RecordedEpisode(
                tree_map(_over_steps, *seen),
                tree_map(_over_steps, *chosen),
                np.array(got, np.float32),
                bool(terminated[row]),
            )
            self._take(episode)


def _row(batch: Tree, row: int) -> Tree:
    """A copy of one row [...] of a batch [N, ...]."""
    copied: Tree = tree_map(lambda leaf: np.array(leaf[row]), batch)
    return copied


def _over_steps(*leaves: NDArray[Any]) -> NDArray[Any]:
    """Stack L arrays [...] to [L, ...]."""
    return np.stack(leaves)
