"""The default model: an actor-critic of two multilayer perceptrons."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from juggler.runtime.modules.activations import Tanh
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, OBSERVATIONS, VALUES
from juggler.runtime.modules.distributions import GaussianSpec
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.rl_module import Batch, RLModule

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU}


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """`model_config` of the default model."""

    hidden_sizes: Sequence[int] = (64, 64)
    """Units of each hidden layer."""
    activation: str = "tanh"
    """tanh or relu."""
    shared_value_layers: bool = False
    """One stack of hidden layers for policy and value function, instead of one each."""

    @classmethod
    def parse(cls, model_config: Mapping[str, Any]) -> MLPConfig:
        """The mapping as a config.

        Raises:
            ValueError: an unknown key, or a value that its key does not allow.
        """
        known = [field.name for field in fields(cls)]
        for key in model_config:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise ValueError(f"model_config has no key {key!r}: {hint}")
        config = cls(**model_config)
        sizes = config.hidden_sizes
        if not isinstance(sizes, (list, tuple)) or not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError(f"model_config.hidden_sizes must be positive integers, not {sizes!r}")
        if config.activation not in tuple(_ACTIVATIONS):
            raise ValueError(
                f"model_config.activation must be one of {', '.join(_ACTIVATIONS)}, "
                f"not {config.activation!r}"
            )
        if not isinstance(config.shared_value_layers, bool):
            raise ValueError(
                "model_config.shared_value_layers must be true or false, "
                f"not {config.shared_value_layers!r}"
            )
        return config


class MLPActorCritic(RLModule):
    """Policy and value function for vector observations.

    For a Box action space the log standard deviations are parameters of their own, the same in
    every state and 0 at first.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        config = MLPConfig.parse(model_config)
        spec = self.action_distribution()
        size = vector_size(observation_space)
        outputs = spec.noise_size if isinstance(spec, GaussianSpec) else spec.inputs_size
        features = config.hidden_sizes[-1] if config.hidden_sizes else size
        self.policy_layers = _layers(size, config)
        self.policy_head = _linear(features, outputs, gain=0.01)  # nearly uniform at first
        self.value_layers = None if config.shared_value_layers else _layers(size, config)
        self.value_head = _linear(features, 1, gain=1.0)
        self.log_std = (
            nn.Parameter(torch.zeros(outputs)) if isinstance(spec, GaussianSpec) else None
        )

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        features = self.policy_layers(_floats(batch[OBSERVATIONS]))  # [B, H]
        return {ACTION_DIST_INPUTS: self._action_dist_inputs(features)}

    def _forward_train(self, batch: Batch) -> dict[str, Tensor]:
        observations = _floats(batch[OBSERVATIONS])  # [B, F]
        features = self.policy_layers(observations)  # [B, H]
        value_layers = self.value_layers
        value_features = features if value_layers is None else value_layers(observations)  # [B, H]
        return {
            ACTION_DIST_INPUTS: self._action_dist_inputs(features),  # [B, D]
            VALUES: self.value_head(value_features).squeeze(-1),  # [B]
        }

    def _action_dist_inputs(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.policy_head(features)  # [B, n] or [B, M]
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], -1)  # [B, 2 M]


def vector_size(space: gymnasium.Space[Any]) -> int:
    """F, the length of a vector observation.

    Raises:
        UnsupportedSpace: the space is not a number or a vector of numbers.
    """
    if isinstance(space, gymnasium.spaces.Box) and len(space.shape) <= 1:
        size = math.prod(space.shape)
        if size > 0 and (np.issubdtype(space.dtype, np.number) or space.dtype == np.bool_):
            return size
    raise UnsupportedSpace(
        f"no default model for observations in {space}: served today are Box spaces of one "
        "dimension or none; give a module of your own, or flatten the observations"
    )


def _floats(observations: Tensor) -> Tensor:
    """Vector observations [B, F] or [B] of any dtype -> float32 [B, F]."""
    if observations.dtype != torch.float32:
        observations = observations.float()  # [B, F] or [B]
    return observations if observations.ndim == 2 else observations.unsqueeze(-1)  # [B, F]


def _layers(size: int, config: MLPConfig) -> nn.Sequential:
    layers: list[nn.Module] = []
    for hidden in config.hidden_sizes:
        layers += [_linear(size, hidden, gain=math.sqrt(2)), _ACTIVATIONS[config.activation]()]
        size = hidden
    return nn.Sequential(*layers)


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
