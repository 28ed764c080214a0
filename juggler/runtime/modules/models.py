"""The default module: an actor-critic with an encoder and two heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from torch import Tensor

from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    CRITIC_OBSERVATIONS,
    OBSERVATIONS,
    STATES,
    VALUES,
)
from juggler.runtime.modules.encoders import feature_size
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.structures import tree_map


class ActorCritic(RLModule):
    """Policy and value function for every space that can be encoded and acted in.

    It has an encoder, then a recurrent core if it has a state, then a head each for the policy and
    the value function, which may have its own encoder. It has one, without a recurrent core, where
    it sees more than observations (`critic_space`). The catalog builds these parts from the
    spaces and the keys of `ModelConfig`.

    Attributes:
        catalog_class: builds the parts unless a catalog is given.
    """

    catalog_class: type[Catalog] = Catalog
    takes_critic_observations = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
        catalog: Catalog | None = None,
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        catalog = catalog or self.catalog_class(observation_space, action_space, model_config)
        self.encoder = catalog.build_encoder()
        features = feature_size(self.encoder)
        self.core: Any = catalog.build_core(features)
        memory = features if self.core is None else feature_size(self.core)
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

    def get_initial_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.core is None else self.core.get_initial_state()
        return state

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
    """Features [B, H] of observations; with a core those [B, T, H] of each step and the ones
    before, and under "states" the state [B, ...] behind the last."""
    if core is None:
        return encoder(batch[OBSERVATIONS]), {}
    features = each_step(encoder, batch[OBSERVATIONS])  # [B, T, F]
    remembered, states = core(features, batch[STATES])  # [B, T, H]
    return remembered, {STATES: states}


def each_step(encoder: Any, observations: Any) -> Tensor:
    """Features [B, T, F] of observations [B, T, ...], or a tree of them."""
    leaf = observations
    while isinstance(leaf, Mapping):
        leaf = next(iter(leaf.values()))
    flat = tree_map(lambda each: each.flatten(0, 1), observations)  # [B T, ...]
    features: Tensor = encoder(flat).unflatten(0, leaf.shape[:2])  # [B, T, F]
    return features
