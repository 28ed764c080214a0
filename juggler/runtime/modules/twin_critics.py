"""TwinCritics: two networks that say what actions are worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.columns import ACTIONS, OBSERVATIONS
from juggler.runtime.modules.distributions import DistributionSpec, SquashedGaussianSpec
from juggler.runtime.modules.encoders import feature_size, without_mask
from juggler.runtime.modules.layers import initialized
from juggler.runtime.modules.rl_module import Batch

#: What forward_train returns: two values of an action [B, 2], or of each action [B, 2, n].
Q_VALUES: Final = "q_values"

#: Keys of `model` that have one right value beside such critics.
_NEEDED = {"squash": True, "free_log_std": False, "shared_value_layers": False}


class TwinCritics(nn.ModuleList):
    """Two networks that value the actions of a Box, which they see beside observations, or each
    action of a Discrete space. Their encoders are those of the default module."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: spaces.Box | spaces.Discrete,
        model_config: Mapping[str, Any],
    ) -> None:
        if isinstance(action_space, spaces.Discrete):
            seen: gymnasium.Space[Any] = observation_space
            values = int(action_space.n)
        else:
            actions = spaces.Box(-1, 1, (int(np.prod(action_space.shape)),), np.float32)
            seen = spaces.Dict({OBSERVATIONS: without_mask(observation_space), ACTIONS: actions})
            values = 1
        catalog = Catalog(seen, action_space, model_config)
        super().__init__(Critic(catalog, values) for _ in range(2))

    def of_all(self, batch: Batch) -> Tensor:
        """Values [B, 2, n] of each action of a Discrete space."""
        return torch.stack([critic(batch[OBSERVATIONS]) for critic in self], 1)  # [B, 2, n]

    def of_taken(self, batch: Batch, distribution: DistributionSpec) -> Tensor:
        """Values [B, 2] of a batch's actions [B, ...] of a Box.

        Args:
            batch: has observations and actions.
            distribution: of the actions; with bounds, critics see them scaled to -1 and 1.
        """
        actions = batch[ACTIONS].reshape(len(batch[ACTIONS]), -1)  # [B, M]
        if isinstance(distribution, SquashedGaussianSpec):
            _, low, width, _, _ = distribution.bounds_on(actions.device)  # [M] each
            actions = 2 * (actions - low) / width - 1  # [B, M] between -1 and 1
        seen = {OBSERVATIONS: batch[OBSERVATIONS], ACTIONS: actions}
        return torch.cat([critic(seen) for critic in self], -1)  # [B, 2]


class Critic(nn.Module):
    """Values [B, n] of what it sees."""

    def __init__(self, catalog: Catalog, values: int) -> None:
        super().__init__()
        self.encoder = catalog.build_encoder()
        head = nn.Linear(feature_size(self.encoder), values)
        self.head = initialized(head, catalog.config.initializer, gain=1.0)

    def forward(self, seen: Any) -> Tensor:
        values: Tensor = self.head(self.encoder(seen))  # [B, n]
        return values


def must_see_actions(
    name: str, action_space: gymnasium.Space[Any], model_config: Mapping[str, Any]
) -> None:
    """
    Raises:
        ValueError: the encoder is one of a user's own, which cannot see actions of a Box.
    """
    encoder = model_config.get("encoder", "auto")
    if isinstance(action_space, spaces.Box) and (callable(encoder) or ":" in str(encoder)):
        raise ValueError(
            f"model.encoder = {encoder!r}: {name} values Box actions by what it "
            "encodes of observations and actions together, which an encoder of your own cannot "
            "know; leave it out"
        )


def model_for_critics(
    name: str, action_space: gymnasium.Space[Any], model_config: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of `model` for a policy beside such critics.

    Args:
        name: of the module's class.
        action_space: what it acts in.
        model_config: the keys that were given.

    Raises:
        ValueError: a key has a value that the module cannot have.
    """
    for key, needed in _NEEDED.items():
        if (given := model_config.get(key, needed)) not in (needed, None):
            raise ValueError(f"model.{key} = {given!r}: {name} needs {needed!r}; leave it out")
    if model_config.get("distribution") is not None:
        raise ValueError(
            f"distribution = {model_config['distribution']!r}: {name} has the one that its "
            "algorithm needs; leave it out"
        )
    must_see_actions(name, action_space, model_config)
    if model_config.get("recurrent", "none") != "none":
        raise ValueError(
            f"{name} has no memory: leave out model.recurrent, or take another "
            "algorithm, such as ppo"
        )
    return {**model_config, **_NEEDED}
