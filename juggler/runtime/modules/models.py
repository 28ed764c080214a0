"""The default module, an actor-critic, and the catalog that builds its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from torch import Tensor, nn

from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    CRITIC_OBSERVATIONS,
    OBSERVATIONS,
    STATES,
    VALUES,
)
from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.modules.distributions import DistributionSpec
from juggler.runtime.modules.encoders import TreeEncoder, build_encoder, feature_size, without_mask
from juggler.runtime.modules.layers import MLP, RecurrentCore, initialized, policy_head
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.structures import first_leaf, tree_map


class Catalog:
    """Builds the parts of an `ActorCritic`, each in an overridable method.

        class WithMyEncoder(Catalog):
            def build_encoder(self):
                return MyEncoder(self.observation_space)  # has a `size`

    A run accepts the name of a catalog instead of a module's.

    Attributes:
        config_class: the class of `model_config`; a subclass may have its own, with more keys.
        observation_space: of the environment, or after the connectors.
        action_space: of the environment, or after the connectors.
        config: the model_config, as a `config_class`.
    """

    config_class: type[ModelConfig] = ModelConfig

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Raise ValueError for a wrong key or value of model_config."""
        self.observation_space = observation_space
        self.action_space = action_space
        self.config = self.config_class.parse(model_config)

    def build_encoder(self) -> nn.Module:
        """Build a module that encodes observations [B, ...] to [B, size]."""
        return build_encoder(self.observation_space, self.config)

    def build_critic_encoder(self) -> nn.Module:
        """Build a privileged critic's encoder to features [B, size].

        Its input is a map of "observations" [B, ...] and "critic_observations" [B, ...], or trees
        of them.
        """
        assert self.config.critic_space is not None
        seen = {
            OBSERVATIONS: without_mask(self.observation_space),
            CRITIC_OBSERVATIONS: self.config.critic_space,
        }
        return build_encoder(gymnasium.spaces.Dict(seen), self.config)

    def build_core(self, features: int) -> nn.Module | None:
        """Build a recurrent core like `RecurrentCore`; None: no state."""
        return None if self.config.recurrent == "none" else RecurrentCore(features, self.config)

    def build_policy_head(self, features: int, distribution: DistributionSpec) -> nn.Module:
        """Build a head from features [..., F] to "action_dist_inputs" [..., D]."""
        return policy_head(features, distribution, self.config)

    def build_value_head(self, features: int) -> nn.Module:
        """Build a head from features [..., F] to values [..., 1]."""
        return initialized(nn.Linear(features, 1), self.config.initializer, gain=1.0)

    def shares_encoder(self, encoder: nn.Module, core: nn.Module | None) -> bool:
        """Return whether policy and value function share one encoder."""
        if self.config.shared_value_layers is not None:
            return self.config.shared_value_layers
        small = isinstance(encoder, MLP) or (
            isinstance(encoder, TreeEncoder) and not encoder.has_images
        )
        return core is not None or not small


class Remembering(RLModule):
    """A module with an encoder and an optional recurrent core."""

    encoder: nn.Module
    core: Any

    def _build_body(self, catalog: Catalog) -> int:
        """Build encoder and core, and return the number of their features."""
        self.encoder = catalog.build_encoder()
        features = feature_size(self.encoder)
        self.core = catalog.build_core(features)
        return features if self.core is None else feature_size(self.core)

    def get_initial_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.core is None else self.core.get_initial_state()
        return state


class ActorCritic(Remembering):
    """Policy and value function for every supported space.

    It has an encoder, an optional recurrent core, and a head each for the policy and the value
    function, which may have its own encoder. A value function with additional inputs
    (`critic_space`) always has its own encoder, without a recurrent core. The catalog builds these
    parts from the spaces and the keys of `ModelConfig`.
    """

    takes_critic_observations = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
        catalog: Catalog | None = None,
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        catalog = catalog or Catalog(observation_space, action_space, model_config)
        memory = self._build_body(catalog)
        self.policy_head = catalog.build_policy_head(memory, self.action_distribution())
        self.value_encoder = None
        self.training_only = ("value_head",)
        if self.critic_space is not None:
            self.value_encoder = catalog.build_critic_encoder()
        elif not catalog.shares_encoder(self.encoder, self.core):
            self.value_encoder = catalog.build_encoder()
        if self.value_encoder is not None:
            memory = feature_size(self.value_encoder)
            self.training_only = ("value_encoder", "value_head")
        self.value_head = catalog.build_value_head(memory)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        features, states = remember(self.encoder, self.core, batch)  # [B, H] or [B, T, H]
        return {ACTION_DIST_INPUTS: self.policy_head(features), **states}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        features, outputs = remember(self.encoder, self.core, batch)  # [B, H] or [B, T, H]
        outputs[ACTION_DIST_INPUTS] = self.policy_head(features)  # [B, D] or [B, T, D]
        if self.value_encoder is not None and self.critic_space is not None:
            seen = {name: batch[name] for name in (OBSERVATIONS, CRITIC_OBSERVATIONS)}
            if self.core is None:
                features = self.value_encoder(seen)  # [B, H]
            else:
                features = each_step(self.value_encoder, seen)  # [B, T, H]
        elif self.value_encoder is not None:
            features = self.value_encoder(batch[OBSERVATIONS])  # [B, H]
        outputs[VALUES] = self.value_head(features).squeeze(-1)  # [B] or [B, T]
        return outputs


def remember(encoder: Any, core: Any, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """Encode observations to [B, H], or [B, T, H] with a core.

    With a core, "states" holds the state [B, ...] after the last step.
    """
    if core is None:
        return encoder(batch[OBSERVATIONS]), {}
    features = each_step(encoder, batch[OBSERVATIONS])  # [B, T, F]
    remembered, states = core(features, batch[STATES])  # [B, T, H]
    return remembered, {STATES: states}


def each_step(encoder: Any, observations: Any) -> Tensor:
    """Encode observations [B, T, ...] step by step -> [B, T, F]."""
    flat = tree_map(lambda each: each.flatten(0, 1), observations)  # [B T, ...]
    features: Tensor = encoder(flat).unflatten(0, first_leaf(observations).shape[:2])  # [B, T, F]
    return features
