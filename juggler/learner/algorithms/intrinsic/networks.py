"""The networks of random network distillation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from juggler.learner.around_config import IntrinsicConfig
from juggler.learner.core.own_network import OwnNetwork
from juggler.runtime.connectors.leaves import at, observed_leaves, replaced, space_with
from juggler.runtime.connectors.tensor_moments import TensorMoments, no_moments, variance
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules.encoders import build_encoder, feature_size
from juggler.runtime.modules.layers import initialized
from juggler.runtime.modules.model_config import ModelConfig
from juggler.runtime.wire.trees import Path

_EPSILON = 1e-8  # added to variances


class Networks(nn.Module):
    """The constant network, the predictor, and a value function of intrinsic rewards."""

    def __init__(self, space: Space[Any], config: IntrinsicConfig, *, with_values: bool) -> None:
        super().__init__()
        model = ModelConfig.parse(config.model)
        self.target = _headed(space, model, config.features)
        self.predictor = _headed(space, model, config.features, hidden=True)
        if with_values:
            self.values = _headed(space, model, 1)

    def forward(self, observations: Any, part: str) -> Tensor:
        """Normalized observations [B, ...] -> the predictor's errors [B], or values [B]."""
        if part == "values":
            values: Tensor = self.values(observations).squeeze(-1)  # [B]
            return values
        with torch.no_grad():
            features = self.target(observations)  # [B, F]
        errors: Tensor = (self.predictor(observations) - features).square().mean(-1)  # [B]
        return errors


class Explorer:
    """These networks, and how observations are normalized for them.

    In a state, `observed` has the moments of each leaf of the observations, by name.
    """

    def __init__(self, space: Space[Any], config: IntrinsicConfig, *, with_values: bool) -> None:
        self._clip = config.clip
        self._leaves: dict[Path, spaces.Box] = {
            path: leaf
            for path, leaf in observed_leaves(space).items()
            if isinstance(leaf, spaces.Box)
        }
        normalized = {
            path: spaces.Box(-self._clip, self._clip, leaf.shape, np.float32)
            for path, leaf in self._leaves.items()
        }
        make = partial(Networks, space_with(space, normalized), config, with_values=with_values)
        self.networks = OwnNetwork(f"{DEFAULT_MODULE} intrinsic", make, constant="target.")

    def beginning(self, seed: int) -> dict[str, Any]:
        """The state before the first sample."""
        observed = {_name(path): no_moments(leaf.shape) for path, leaf in self._leaves.items()}
        return {**self.networks.beginning(seed), "observed": observed}

    def leaves(self, observations: Any) -> dict[str, Tensor]:
        """The leaves of observations [B, ...] that are normalized, by name."""
        return {_name(path): at(observations, path) for path in self._leaves}

    def normalized(self, observed: Mapping[str, TensorMoments], observations: Any) -> Any:
        """Observations [B, ...] with mean 0 and deviation 1, clipped."""
        if not self._leaves:
            return observations
        leaves = {}
        for path in self._leaves:
            moments, x = observed[_name(path)], at(observations, path).float()  # [B, ...]
            scale = torch.rsqrt(variance(moments) + _EPSILON)  # [...]
            apart = (x - moments["mean"].float()) * scale.float()  # [B, ...]
            leaves[path] = apart.clamp(-self._clip, self._clip)  # [B, ...]
        return replaced(observations, leaves)


def _headed(
    space: Space[Any], model: ModelConfig, outputs: int, *, hidden: bool = False
) -> nn.Sequential:
    """An encoder and a linear layer -> [B, outputs]; perhaps with a hidden layer between them."""
    encoder = build_encoder(space, model)
    size = feature_size(encoder)
    layers: list[nn.Module] = [encoder]
    if hidden:
        layers += [initialized(nn.Linear(size, size), model.initializer), nn.ReLU()]
    return nn.Sequential(*layers, initialized(nn.Linear(size, outputs), model.initializer, 1.0))


def _name(path: Path) -> str:
    """What a state calls a leaf of the observations."""
    return ".".join(path) or "observation"
