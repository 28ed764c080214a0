"""QNetwork: action values, and the amount of exploration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import torch
from torch import Tensor, nn

from juggler.runtime.modules.actor_critics import EXPLORATION_NOISE
from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTION_MASK,
    OBSERVATIONS,
    VALUES,
)
from juggler.runtime.modules.config import QNetworkConfig
from juggler.runtime.modules.layers import DuelingHead, initialized
from juggler.runtime.modules.models import Catalog, Remembering, remember
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.errors import UnsupportedSpace

#: The buffer with the share of random actions, which the learner sets.
EPSILON: Final = "epsilon"
#: The buffer [K] with the returns of a module with `atoms`, and the output with the logits of
#: their probabilities.
RETURNS: Final = "returns"
RETURN_LOGITS: Final = "return_logits"


class QCatalog(Catalog):
    """Builds the parts of a `QNetwork`."""

    config_class = QNetworkConfig


class QNetwork(Remembering):
    """Values of Discrete actions, after the default module's encoder.

    In training it returns values [B, n] as "action_dist_inputs", and their maximum [B] as
    "values". It explores ε-greedily. Heads see normalized features (Ba et al. 2016, "Layer
    Normalization"), which keeps values from diverging without a target network.

    With `atoms` = K in `model_config`, the values are means over K equidistant returns (Bellemare
    et al. 2017, "A Distributional Perspective on Reinforcement Learning"). The network also
    returns the logits [B, n, K] of their probabilities, as "return_logits".

    With `dueling`, the values or logits come from a `DuelingHead`.
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
        features = self._build_body(catalog)
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
    """Raise ValueError if an algorithm and its Q-module do not match.

    Args:
        algorithm: its name, for errors.
        module: the algorithm's module.
        learns_returns: whether the algorithm learns the probabilities of returns.
    """
    if module.critic_space is not None:
        raise ValueError(
            f"critic_sees with algorithm = {algorithm!r}: its values choose actions, so they "
            "have only the inputs of acting; leave critic_sees out, or choose ppo, appo or impala"
        )
    if RETURNS in dict(module.named_buffers()) and not learns_returns:
        raise ValueError(
            f"model.atoms with algorithm = {algorithm!r}: only dqn learns the probabilities of "
            "returns; leave atoms out, or choose dqn"
        )
    if EPSILON not in dict(module.named_buffers()):
        raise ValueError(
            f"{algorithm} needs a module with a buffer {EPSILON!r}, such as QNetwork, but "
            f"{type(module).__name__} has none"
        )


def exploration_of(module: RLModule) -> str:
    """Return the buffer that controls how much a module explores.

    Raises:
        ValueError: there is no such buffer.
    """
    buffers = dict(module.named_buffers())
    for name in (EPSILON, EXPLORATION_NOISE):
        if name in buffers:
            return name
    raise ValueError(
        f"exploration_ladder: {type(module).__name__} has no buffer {EPSILON!r} or "
        f"{EXPLORATION_NOISE!r} that controls how much it explores; set it to 0"
    )


def with_own_exploration(module: RLModule, rows: int) -> None:
    """Give each of B rows its own exploration number."""
    # The outputs of a module with a state have a time dimension.
    shape = (rows, 1, 1) if module.get_initial_state() else (rows, 1)
    name = exploration_of(module)
    common = module.get_buffer(name)  # []
    module.register_buffer(name, common.expand(shape).clone())  # [B, 1] or [B, 1, 1]
