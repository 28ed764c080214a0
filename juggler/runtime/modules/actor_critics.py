"""Actor-critics with action values: SAC, TD3 and IQL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, OBSERVATIONS
from juggler.runtime.modules.distributions import (
    ClippedGaussianSpec,
    SquashedGaussianSpec,
    distribution_for,
)
from juggler.runtime.modules.encoders import feature_size, without_mask
from juggler.runtime.modules.layers import initialized
from juggler.runtime.modules.models import ActorCritic, Catalog
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.errors import UnsupportedSpace

#: Output of forward_train: two values of an action [B, 2], or of each action [B, 2, n].
Q_VALUES: Final = "q_values"

#: Keys of `model` that have only one valid value alongside these critics.
_NEEDED = {"squash": True, "free_log_std": False, "shared_value_layers": False}


class TwinCritics(nn.ModuleList):
    """Two networks for values of Box or Discrete actions.

    They see Box actions alongside observations. Encoders are the default module's.
    """

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

    def of(self, batch: Batch, module: RLModule) -> dict[str, Any]:
        """Return values [B, 2] of actions, or [B, 2, n] if Discrete.

        Critics see actions with bounds scaled to -1 and 1.
        """
        if isinstance(module.action_space, spaces.Discrete):
            values = [critic(batch[OBSERVATIONS]) for critic in self]  # [B, n] each
            return {Q_VALUES: torch.stack(values, 1)}  # [B, 2, n]
        actions = batch[ACTIONS].reshape(len(batch[ACTIONS]), -1)  # [B, M]
        distribution = module.action_distribution()
        if isinstance(distribution, SquashedGaussianSpec):
            _, low, width, _, _ = distribution.bounds_on(actions.device)  # [M] each
            actions = 2 * (actions - low) / width - 1  # [B, M] between -1 and 1
        seen = {OBSERVATIONS: batch[OBSERVATIONS], ACTIONS: actions}
        return {Q_VALUES: torch.cat([critic(seen) for critic in self], -1)}  # [B, 2]


class Critic(nn.Module):
    """A network for values [B, n] of its input."""

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
    """Raise ValueError if a custom encoder cannot see Box actions."""
    encoder = model_config.get("encoder", "auto")
    if isinstance(action_space, spaces.Box) and (callable(encoder) or ":" in str(encoder)):
        raise ValueError(
            f"model.encoder = {encoder!r}: {name} needs to encode Box actions, "
            "which your own encoder cannot "
            "do; leave it out"
        )


def model_for_critics(
    name: str, action_space: gymnasium.Space[Any], model_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of `model` for a policy alongside these critics.

    Args:
        name: of the module's class.
        action_space: of the policy.
        model_config: the keys that were given.

    Raises:
        ValueError: a key has a value that the module cannot have.
    """
    for key, needed in _NEEDED.items():
        if (given := model_config.get(key, needed)) not in (needed, None):
            raise ValueError(f"model.{key} = {given!r}: {name} needs {needed!r}; leave it out")
    if model_config.get("distribution") is not None:
        raise ValueError(
            f"distribution = {model_config['distribution']!r}: {name} has the "
            "distribution that its algorithm needs; leave it out"
        )
    must_see_actions(name, action_space, model_config)
    if model_config.get("recurrent", "none") != "none":
        raise ValueError(
            f"{name} has no memory: leave out model.recurrent, or choose another "
            "algorithm, such as ppo"
        )
    return {**model_config, **_NEEDED}


#: The parameter with the logarithm of the temperature.
LOG_TEMPERATURE: Final = "log_temperature"

LOG_STD_LIMITS = -10.0, 2.0  # beyond these, actions are certain, or all at their bounds


class SoftActorCritic(RLModule):
    """A stochastic policy and twin critics, for Box and Discrete actions.

    The policy of a Box is a squashed Gaussian whose standard deviations depend on the observation.
    For observations only, `forward_train` returns "action_dist_inputs" [B, D], and for Discrete
    actions also "q_values" [B, 2, n]. With a Box and a batch that also has "actions" [B, ...], it
    returns only their "q_values" [B, 2].

    Encoders are the default module's: one for the policy and one for each critic.
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
        self._log_std = len(distribution.log_std_inputs)  # number of inputs at the end
        self.critics = TwinCritics(observation_space, action_space, model_config)
        self.log_temperature = nn.Parameter(torch.zeros(()))  # []

    def _forward(self, batch: Batch) -> dict[str, Any]:
        inputs = self.policy_head(self.encoder(batch[OBSERVATIONS]))  # [B, D]
        if self._log_std:
            means, log_std = inputs.tensor_split([-self._log_std], -1)  # [B, M] each
            inputs = torch.cat([means, log_std.clamp(*LOG_STD_LIMITS)], -1)  # [B, D]
        return {ACTION_DIST_INPUTS: inputs}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        if isinstance(self.action_space, spaces.Discrete):
            return self._forward(batch) | self.critics.of(batch, self)
        return self.critics.of(batch, self) if ACTIONS in batch else self._forward(batch)


#: The buffer with the standard deviation of the noise, which the learner sets.
EXPLORATION_NOISE: Final = "exploration_noise"

SMALLEST_NOISE = 1e-8  # has a logarithm, and moves no action of float32 by more than a rounding


class DeterministicActorCritic(RLModule):
    """A deterministic policy and twin critics, for a bounded Box.

    tanh squashes actions to the bounds. Exploration adds normal noise and clips the sum; the buffer
    "exploration_noise" is its standard deviation, in halves of the distance between the bounds.
    Until a learner sets it, it is infinite, and actions are drawn uniformly from the Box.

    For observations only, `forward_train` returns "action_dist_inputs" [B, 2 M]. For a batch that
    also has "actions" [B, ...], it returns only their "q_values" [B, 2]. Encoders are the default
    module's: one for the policy and one for each critic.
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
        assert isinstance(action_space, spaces.Box)  # other spaces have no such distribution
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
        return self.critics.of(batch, self) if ACTIONS in batch else self._forward(batch)


def _distribution(name: str, space: gymnasium.Space[Any]) -> ClippedGaussianSpec:
    """
    Args:
        name: of the module's class.
        space: of its actions.

    Raises:
        UnsupportedSpace: this space has no such distribution.
    """
    if not isinstance(space, spaces.Box):
        raise UnsupportedSpace(f"{name} acts in Box spaces, and not in {space}")
    distribution_for(space)  # rejects integers and empty spaces
    spec = ClippedGaussianSpec(space.low, space.high)
    if not spec.is_bounded:
        raise UnsupportedSpace(
            f"{name} squashes each element of an action to finite bounds, one clearly above the "
            f"other, which {space} does not have: choose another algorithm, such as sac, or "
            "change the bounds of the action space"
        )
    return spec


class ImplicitActorCritic(ActorCritic):
    """The default module with twin critics, for Box and Discrete actions.

    `forward_train` returns the same as the default module. For a batch that also has "actions" [B,
    ...], it returns only "q_values": of these actions [B, 2], or for Discrete actions of all
    actions [B, 2, n].
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
        return self.critics.of(batch, self) if ACTIONS in batch else super()._forward_train(batch)
