"""DeterministicActorCritic: one action for each observation, and what actions are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, OBSERVATIONS
from juggler.runtime.modules.distributions import ClippedGaussianSpec, distribution_for
from juggler.runtime.modules.encoders import feature_size
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.layers import initialized
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.modules.twin_critics import Q_VALUES, TwinCritics, model_for_critics

#: The buffer with the standard deviation of the noise, which the learner sets.
EXPLORATION_NOISE: Final = "exploration_noise"

SMALLEST_NOISE = 1e-8  # has a logarithm, and moves no action of float32 by more than a rounding


class DeterministicActorCritic(RLModule):
    """A policy that chooses one action for each observation, and two networks that say what actions
    are worth, for a Box with bounds.

    tanh squashes actions to the bounds. Where the policy explores, it adds normal noise and clips
    the sum; the buffer "exploration_noise" is its standard deviation, in halves of the distance
    between the bounds. It is infinite until a learner sets it, which stands for actions that are
    drawn uniformly from the Box.

    `forward_train` returns "action_dist_inputs" [B, 2 M] for observations alone. For a batch that
    has "actions" [B, ...] too, it returns nothing but their "q_values" [B, 2]. Encoders are those
    of the default module, one for the policy and one for each of the two.
    """

    training_only = ("critics",)
    exploration_noise: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        name = type(self).__name__
        model_config = model_for_critics(name, action_space, model_config)
        super().__init__(observation_space, action_space, model_config)
        self._distribution = _distribution(name, action_space)
        assert isinstance(action_space, spaces.Box)  # else it has no such distribution
        catalog = Catalog(observation_space, action_space, model_config)
        self.encoder = catalog.build_encoder()
        size = self._distribution.noise_size
        head = nn.Linear(feature_size(self.encoder), size)
        self.policy_head = initialized(head, catalog.config.initializer, gain=0.01)
        self.critics = TwinCritics(observation_space, action_space, model_config)
        self.register_buffer(EXPLORATION_NOISE, torch.tensor(math.inf))  # []

    def action_distribution(self) -> ClippedGaussianSpec:
        return self._distribution

    def _forward(self, batch: Batch) -> dict[str, Any]:
        chosen = self.policy_head(self.encoder(batch[OBSERVATIONS]))  # [B, M] before tanh
        # The noise is [], or has a number for each row: see `with_own_exploration`.
        noise = self.exploration_noise.clamp(min=SMALLEST_NOISE).log().to(chosen.dtype)
        return {ACTION_DIST_INPUTS: torch.cat([chosen, noise.expand_as(chosen)], -1)}  # [B, 2 M]

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        if ACTIONS not in batch:
            return self._forward(batch)
        return {Q_VALUES: self.critics.of_taken(batch, self._distribution)}  # [B, 2]


def _distribution(name: str, space: gymnasium.Space[Any]) -> ClippedGaussianSpec:
    """
    Args:
        name: of the module's class.
        space: of its actions.

    Raises:
        UnsupportedSpace: there is no such distribution for this space.
    """
    if not isinstance(space, spaces.Box):
        raise UnsupportedSpace(f"{name} acts in Box spaces, and not in {space}")
    distribution_for(space)  # whole numbers and no elements are refused there
    spec = ClippedGaussianSpec(space.low, space.high)
    if not spec.is_bounded:
        raise UnsupportedSpace(
            f"{name} squashes each element of an action to finite bounds, one clearly above the "
            f"other, and {space} has others: choose another algorithm, such as sac, or give the "
            "action space such bounds"
        )
    return spec
