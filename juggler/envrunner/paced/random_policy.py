"""Actions at random: of players in matches, and of the module `random` in a run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.envrunner.environments.seeding import noise_seed
from juggler.envrunner.paced.places import put
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.modules.distributions import distribution_for
from juggler.runtime.wire.structures import from_tree, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Tree

#: With equal logits, every action of these spaces is equally likely.
_CHOICES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class RandomActions:
    """Draws actions uniformly among the legal ones.

    Args:
        action_space: of an agent.
        seed: of the draws.

    Raises:
        UnsupportedSpace: no policy could act in this space.
    """

    def __init__(self, action_space: Space[Any], seed: int = 0) -> None:
        self._space = deepcopy(action_space)  # it has a generator of its own
        self._distribution = distribution_for(action_space)
        self._generator = torch.Generator()
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the draws anew."""
        self._space.seed(noise_seed(seed) >> 31)  # spaces take 32 bits
        self._generator.manual_seed(noise_seed(seed))

    def draw(self, count: int, observations: Any) -> Tree:
        """Draw actions.

        Args:
            count: B.
            observations: [B, ...], which may have an action mask.

        Returns:
            The actions [B, ...], as a tree of the action space.
        """
        masks = observations.get(ACTION_MASK) if isinstance(observations, Mapping) else None
        if masks is not None or isinstance(self._space, _CHOICES):
            return self._with_equal_logits(count, masks)
        actions = zeros(self._space, (count,))  # [B, ...]
        for k in range(count):
            put(actions, k, to_tree(self._space, self._space.sample()))
        return actions

    def _with_equal_logits(self, count: int, masks: Tree | None) -> Tree:
        spec = self._distribution
        logits = torch.zeros(count, spec.inputs_size)  # [B, D]
        if masks is not None:
            logits = spec.mask(logits, tree_map(torch.from_numpy, masks))  # [B, D]
        actions = spec(logits).sample(spec.draw_noise((count,), self._generator))  # [B, ...]
        drawn: Tree = tree_map(Tensor.numpy, actions)
        return drawn


class RandomPolicy:
    """The module `random`, as a `PlacePolicy`. Nobody learns from its steps.

    Args:
        action_space: of its agents.
        seed: of the draws.

    Raises:
        UnsupportedSpace: no policy could act in this space.
    """

    def __init__(self, action_space: Space[Any], seed: int) -> None:
        self.blank_inputs = np.zeros(0, np.float32)
        self.remembers = False
        self._space = action_space
        self._actions = RandomActions(action_space, seed)

    def seed(self, seed: int) -> None:
        self._actions.seed(seed)

    def grow(self, capacity: int) -> None:
        """Nothing is kept for an agent."""

    def act(
        self, observations: Any, places: NDArray[np.intp], first: NDArray[np.bool_]
    ) -> tuple[Any, Any, NDArray[np.float32]]:
        drawn = self._actions.draw(len(places), observations)  # [B, ...]
        return from_tree(self._space, drawn), drawn, np.zeros((len(places), 0), np.float32)

    def act_deterministically(
        self, observations: Any, places: NDArray[np.intp], first: NDArray[np.bool_]
    ) -> Any:
        """Draw here too: no action is better than another."""
        return self.act(observations, places, first)[0]

    def rewarded(self, places: NDArray[np.intp], rewards: NDArray[np.floating[Any]]) -> None:
        """Nothing depends on rewards."""

    def states_before(self, places: NDArray[np.intp]) -> dict[str, Tree]:
        return {}

    def log_probabilities(self, inputs: NDArray[np.float32], actions: Tree) -> NDArray[np.float32]:
        raise RuntimeError("steps of the module 'random' are not recorded")

    def why_not_finite(self, inputs: NDArray[np.float32]) -> str:
        return ""
