"""The networks of random network distillation, for the observations of one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn
from torch.func import functional_call

from juggler.learner.intrinsic_config import IntrinsicConfig
from juggler.learner.optim.parameter_group import seeded
from juggler.runtime.connectors.leaves import at, observed_leaves, replaced, space_with
from juggler.runtime.connectors.tensor_moments import TensorMoments, no_moments, variance
from juggler.runtime.modules.encoders import build_encoder, feature_size
from juggler.runtime.modules.layers import initialized
from juggler.runtime.modules.model_config import ModelConfig
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Path

#: Observations in one pass without gradients.
_CHUNK = 2048
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
    """What is constant about these networks. Their tensors are in states.

    In a state, `constant` has the tensors that never change by name, `trained` is the vector [P] of
    all others, and `observed` has the moments of each leaf of the observations, by name.
    """

    def __init__(
        self, module_id: str, space: Space[Any], config: IntrinsicConfig, *, with_values: bool
    ) -> None:
        self._module_id, self._config, self._with_values = module_id, config, with_values
        self._leaves: dict[Path, spaces.Box] = {
            path: leaf
            for path, leaf in observed_leaves(space).items()
            if isinstance(leaf, spaces.Box)
        }
        limit = config.clip
        normalized = {
            path: spaces.Box(-limit, limit, leaf.shape, np.float32)
            for path, leaf in self._leaves.items()
        }
        self._space = space_with(space, normalized)
        self._networks = self._made(0)
        shapes = {
            name: parameter.shape
            for name, parameter in self._networks.named_parameters()
            if not name.startswith("target.")
        }
        self._shapes = shapes
        self._sizes = [shape.numel() for shape in shapes.values()]

    def beginning(self, seed: int) -> dict[str, Any]:
        """`constant`, `trained` and `observed` before the first sample."""
        networks = self._made(seed)
        tensors = {name: x.detach() for name, x in networks.named_parameters()}
        trained = torch.cat([tensors.pop(name).reshape(-1) for name in self._shapes])  # [P]
        constant = {**tensors, **dict(networks.named_buffers())}
        observed = {_name(path): no_moments(leaf.shape) for path, leaf in self._leaves.items()}
        return {"constant": constant, "trained": trained, "observed": observed}

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
            leaves[path] = apart.clamp(-self._config.clip, self._config.clip)  # [B, ...]
        return replaced(observations, leaves)

    def __call__(
        self, constant: Mapping[str, Tensor], trained: Tensor, observations: Any, part: str
    ) -> Tensor:
        """As `Networks`, with the tensors of a state."""
        pieces = zip(self._shapes.items(), torch.split(trained, self._sizes), strict=True)
        named = {name: piece.view(shape) for (name, shape), piece in pieces}
        result: Tensor = functional_call(
            self._networks, {**constant, **named}, (observations, part)
        )
        return result

    @torch.no_grad()
    def in_chunks(
        self, constant: Mapping[str, Tensor], trained: Tensor, observations: Any, part: str
    ) -> Tensor:
        """The same without gradients, in memory that does not grow with the observations."""
        leaves: list[Tensor] = []
        tree_map(leaves.append, observations)
        count = len(leaves[0])
        parts = [
            self(
                constant,
                trained,
                tree_map(lambda x, start=start: x[start : start + _CHUNK], observations),
                part,
            )
            for start in range(0, count, _CHUNK)
        ]
        return torch.cat(parts)  # [B]

    def _made(self, seed: int) -> Networks:
        with seeded(seed, f"{self._module_id} intrinsic"):
            return Networks(self._space, self._config, with_values=self._with_values)


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
