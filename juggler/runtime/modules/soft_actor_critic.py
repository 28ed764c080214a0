"""SoftActorCritic: a policy, what actions are worth, and how much its entropy is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import torch
from gymnasium import spaces
from torch import nn

from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, OBSERVATIONS
from juggler.runtime.modules.encoders import feature_size
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.modules.twin_critics import Q_VALUES, TwinCritics, model_for_critics

#: The parameter with the logarithm of the temperature.
LOG_TEMPERATURE: Final = "log_temperature"

LOG_STD_LIMITS = -10.0, 2.0  # beyond these, actions are certain, or all at their bounds


class SoftActorCritic(RLModule):
    """A policy and two networks that say what actions are worth, for Box and Discrete actions.

    The policy of a Box is a squashed Gaussian whose standard deviations depend on the observation.
    `forward_train` returns "action_dist_inputs" [B, D] for observations alone, and for Discrete
    actions "q_values" [B, 2, n] too. For a Box, a batch that has "actions" [B, ...] as well gets
    nothing but their "q_values" [B, 2].

    Encoders are those of the default module, one for the policy and one for each of the two.
    """

    training_only = ("critics", LOG_TEMPERATURE)

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        model_config = model_for_critics(type(self).__name__, action_space, model_config)
        if not isinstance(action_space, spaces.Box | spaces.Discrete):
            raise UnsupportedSpace(
                f"{type(self).__name__} acts in Box and Discrete spaces, and not in {action_space}"
            )
        super().__init__(observation_space, action_space, model_config)
        catalog = Catalog(observation_space, action_space, model_config)
        self.encoder = catalog.build_encoder()
        distribution = self.action_distribution()
        self.policy_head = catalog.build_policy_head(feature_size(self.encoder), distribution)
        self._log_std = len(distribution.log_std_inputs)  # the last ones
        self.critics = TwinCritics(observation_space, action_space, model_config)
        self.log_temperature = nn.Parameter(torch.zeros(()))  # []

    @property
    def is_discrete(self) -> bool:
        """Whether values are those of all actions."""
        return isinstance(self.action_space, spaces.Discrete)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        inputs = self.policy_head(self.encoder(batch[OBSERVATIONS]))  # [B, D]
        if self._log_std:
            means, log_std = inputs.tensor_split([-self._log_std], -1)  # [B, M] each
            inputs = torch.cat([means, log_std.clamp(*LOG_STD_LIMITS)], -1)  # [B, D]
        return {ACTION_DIST_INPUTS: inputs}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        if self.is_discrete:
            return {**self._forward(batch), Q_VALUES: self.critics.of_all(batch)}  # [B, 2, n]
        if ACTIONS not in batch:
            return self._forward(batch)
        return {Q_VALUES: self.critics.of_taken(batch, self.action_distribution())}  # [B, 2]
