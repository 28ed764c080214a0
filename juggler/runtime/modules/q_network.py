"""QNetwork: what each action is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import torch
from torch import Tensor, nn

from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTION_MASK,
    OBSERVATIONS,
    VALUES,
)
from juggler.runtime.modules.dueling import DuelingHead
from juggler.runtime.modules.encoders import feature_size
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.layers import initialized
from juggler.runtime.modules.model_config import QNetworkConfig
from juggler.runtime.modules.models import remember
from juggler.runtime.modules.rl_module import Batch, RLModule

#: The buffer with the share of actions that are drawn at random, which the learner sets.
EPSILON: Final = "epsilon"
#: The buffer [K] with the returns that a module with `atoms` knows the probabilities of, and the
#: output with the logits of these.
RETURNS: Final = "returns"
RETURN_LOGITS: Final = "return_logits"


class QCatalog(Catalog):
    """Builds the parts of a `QNetwork`."""

    config_class = QNetworkConfig


class QNetwork(RLModule):
    """Values of the actions of a Discrete space, behind the encoder of the default module.

    In training it returns values [B, n] as "action_dist_inputs", and the largest of them [B] as
    "values". It explores ε-greedily. What heads see is normalized (Ba et al. 2016, "Layer
    Normalization"), which keeps values from running away where no target network holds them.

    With `atoms` in `model_config`, K of them, the values are means of K returns, which lie at equal
    distances (Bellemare et al. 2017, "A Distributional Perspective on Reinforcement Learning"). The
    network returns the logits [B, n, K] of their probabilities, too, as "return_logits".

    With `dueling`, values, or these logits, come from a `DuelingHead`.
    """

    epsilon: Tensor
    returns: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        if not isinstance(action_space, gymnasium.spaces.Discrete):
            raise UnsupportedSpace(
                f"{type(self).__name__} acts in Discrete spaces, and not in {action_space}"
            )
        catalog = QCatalog(observation_space, action_space, model_config)
        assert isinstance(catalog.config, QNetworkConfig)
        self.atoms, limits = catalog.config.atoms, (catalog.config.v_min, catalog.config.v_max)
        self.encoder = catalog.build_encoder()
        features = feature_size(self.encoder)
        self.core: Any = catalog.build_core(features)
        features = features if self.core is None else feature_size(self.core)
        self.normalize = nn.LayerNorm(features)
        self.value_head: nn.Module
        if catalog.config.dueling:
            actions, numbers = int(action_space.n), self.atoms or 1
            self.value_head = DuelingHead(features, actions, numbers, catalog.config)
        elif self.atoms:
            outputs = nn.Linear(features, int(action_space.n) * self.atoms)
            self.value_head = initialized(outputs, catalog.config.initializer, gain=0.01)
        else:
            self.value_head = catalog.build_policy_head(features, self.action_distribution())
        if self.atoms:
            self.register_buffer(RETURNS, torch.linspace(*limits, self.atoms))  # [K]
        self.register_buffer(EPSILON, torch.tensor(1.0))  # []

    def get_initial_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.core is None else self.core.get_initial_state()
        return state

    def _forward(self, batch: Batch) -> dict[str, Any]:
        features, states = remember(self.encoder, self.core, batch)  # [B, H] or [B, T, H]
        values = self.value_head(self.normalize(features))  # [B, n] or [B, T, n]
        if self.atoms:
            logits = values.unflatten(-1, (-1, self.atoms))  # [B, n, K] or [B, T, n, K]
            values = (logits.softmax(-1) * self.returns).sum(-1)  # [B, n] or [B, T, n]
            states = {RETURN_LOGITS: logits, **states}
        if self._masked:
            mask = batch[OBSERVATIONS][ACTION_MASK]
            values = self.action_distribution().mask(values, mask)
        return {ACTION_DIST_INPUTS: values, **states}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        outputs = self._forward(batch)
        return {**outputs, VALUES: outputs[ACTION_DIST_INPUTS].max(-1).values}

    def _forward_exploration(self, batch: Batch) -> dict[str, Any]:
        outputs = self._forward(batch)
        values = outputs[ACTION_DIST_INPUTS]  # [B, n] or [B, T, n]
        legal = torch.ones_like(values)  # [B, n]
        if self._masked:
            legal = batch[OBSERVATIONS][ACTION_MASK].to(values.dtype).view_as(values)
        best = nn.functional.one_hot(values.argmax(-1), values.shape[-1])  # [B, n]
        any_action = legal / legal.sum(-1, keepdim=True).clamp(min=1)  # [B, n]
        # ε is [], or has a number for each row: see `with_own_exploration`.
        shares = self.epsilon * any_action + (1 - self.epsilon) * best  # [B, n]
        return {**outputs, ACTION_DIST_INPUTS: shares.clamp(min=1e-8).log()}


def must_explore(algorithm: str, module: RLModule, learns_returns: bool = False) -> None:
    """
    Args:
        algorithm: its name, for errors.
        module: what the algorithm trains.
        learns_returns: whether the algorithm learns the probabilities of returns.

    Raises:
        ValueError: the algorithm cannot say how much the module explores, the module's values see
            what acting does not, or it estimates probabilities of returns that the algorithm does
            not learn.
    """
    if module.critic_space is not None:
        raise ValueError(
            f"critic_sees with algorithm = {algorithm!r}: its values choose actions, so that they "
            "can see only what acting sees; leave critic_sees out, or choose ppo, appo or impala"
        )
    if RETURNS in dict(module.named_buffers()) and not learns_returns:
        raise ValueError(
            f"model.atoms with algorithm = {algorithm!r}: only dqn learns the probabilities of "
            "returns; leave atoms out, or choose dqn"
        )
    if EPSILON not in dict(module.named_buffers()):
        raise ValueError(
            f"{algorithm} needs a module with a buffer {EPSILON!r}, such as QNetwork, and "
            f"{type(module).__name__} has none"
        )
