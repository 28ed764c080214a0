"""Catalog: a factory for the parts of the default module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from torch import nn

from juggler.runtime.modules.columns import CRITIC_OBSERVATIONS, OBSERVATIONS
from juggler.runtime.modules.distributions import DistributionSpec
from juggler.runtime.modules.encoders import TreeEncoder, build_encoder, without_mask
from juggler.runtime.modules.heads import policy_head
from juggler.runtime.modules.layers import MLP, initialized
from juggler.runtime.modules.model_config import ModelConfig
from juggler.runtime.modules.recurrent_cores import RecurrentCore


class Catalog:
    """Builds the parts of an `ActorCritic`, each in a method that a subclass may override.

        class WithMyEncoder(Catalog):
            def build_encoder(self):
                return MyEncoder(self.observation_space)  # has a `size`

    A run accepts the name of a catalog in place of a module's.

    Attributes:
        config_class: the class of `model_config`; a subclass may use its own, with more keys.
        observation_space: of the environment, or after the connectors.
        action_space: likewise.
        config: the model_config, as a `config_class`.
    """

    config_class: type[ModelConfig] = ModelConfig

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Raises:
        ValueError: model_config has a wrong key or value.
        """
        self.observation_space = observation_space
        self.action_space = action_space
        self.config = self.config_class.parse(model_config)

    def build_encoder(self) -> nn.Module:
        """Maps observations [B, ...], or a tree of them, to features [B, size]."""
        return build_encoder(self.observation_space, self.config)

    def build_critic_encoder(self) -> nn.Module:
        """Maps what a value function sees that sees more than its agent to features [B, size]: a
        map of "observations" [B, ...] and "critic_observations" [B, ...], or trees of them."""
        assert self.config.critic_space is not None
        seen = {
            OBSERVATIONS: without_mask(self.observation_space),
            CRITIC_OBSERVATIONS: self.config.critic_space,
        }
        return build_encoder(gymnasium.spaces.Dict(seen), self.config)

    def build_core(self, features: int) -> nn.Module | None:
        """Maps features [B, T, F] and states to features [B, T, size] and states, like
        `RecurrentCore`. None: the module has no state."""
        return None if self.config.recurrent == "none" else RecurrentCore(features, self.config)

    def build_policy_head(self, features: int, distribution: DistributionSpec) -> nn.Module:
        """Maps features [..., F] to "action_dist_inputs" [..., D]."""
        return policy_head(features, distribution, self.config)

    def build_value_head(self, features: int) -> nn.Module:
        """Maps features [..., F] to values [..., 1]."""
        return initialized(nn.Linear(features, 1), self.config.initializer, gain=1.0)

    def shares_encoder(self, encoder: nn.Module, core: nn.Module | None) -> bool:
        """Whether the value function uses the policy's encoder instead of one of its own."""
        if self.config.shared_value_layers is not None:
            return self.config.shared_value_layers
        small = isinstance(encoder, MLP) or (
            isinstance(encoder, TreeEncoder) and not encoder.has_images
        )
        return core is not None or not small
