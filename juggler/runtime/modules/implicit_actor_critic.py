"""ImplicitActorCritic: a policy, what observations are worth, and what actions are worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium import spaces

from juggler.runtime.modules.columns import ACTIONS
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.rl_module import Batch
from juggler.runtime.modules.twin_critics import Q_VALUES, TwinCritics, must_see_actions


class ImplicitActorCritic(ActorCritic):
    """The default module with two networks beside it that say what actions are worth, for Box and
    Discrete actions.

    `forward_train` returns what the default module does. A batch that has "actions" [B, ...] as
    well gets nothing but "q_values": those of these actions [B, 2], or for Discrete actions those
    of each one [B, 2, n].
    """

    takes_critic_observations = False

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        if not isinstance(action_space, spaces.Box | spaces.Discrete):
            raise UnsupportedSpace(
                f"{type(self).__name__} acts in Box and Discrete spaces, and not in {action_space}"
            )
        must_see_actions(type(self).__name__, action_space, model_config)
        super().__init__(observation_space, action_space, model_config)
        self.critics = TwinCritics(observation_space, action_space, model_config)
        self.training_only = (*self.training_only, "critics")

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        if ACTIONS not in batch:
            return super()._forward_train(batch)
        if isinstance(self.action_space, spaces.Discrete):
            return {Q_VALUES: self.critics.of_all(batch)}  # [B, 2, n]
        return {Q_VALUES: self.critics.of_taken(batch, self.action_distribution())}  # [B, 2]
