"""Steps as a discriminator sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from juggler.learner.algorithms.imitation.demonstrations import Demonstrations
from juggler.runtime.connectors.leaves import at, observed_leaves
from juggler.runtime.modules.encoders import Numbers, OneHot
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.trees import Path

Space = gymnasium.Space[Any]
_CLIP = 10.0  # of normalized numbers
_PIECE = 1 << 18  # numbers that are looked at together
_EPSILON = 1e-4  # added to standard deviations


class Normalized(nn.Module):
    """Numbers of a Box, clipped to its bounds as an environment does with actions, and normalized
    by demonstrated ones."""

    def __init__(self, box: spaces.Box, demonstrated: Tensor) -> None:
        """Args:
        box: of the numbers.
        demonstrated: [M, ...].
        """
        super().__init__()
        self.low: Tensor
        self.high: Tensor
        self.mean: Tensor
        self.deviation: Tensor
        for name, bound in (("low", box.low), ("high", box.high)):
            self.register_buffer(name, torch.as_tensor(bound).float())  # [...]
        mean = self._mean(demonstrated, lambda x: x)  # [...]
        variance = self._mean(demonstrated, lambda x: (x - mean).square())  # [...]
        self.register_buffer("mean", mean.float())  # [...]
        self.register_buffer("deviation", (variance.sqrt() + _EPSILON).float())  # [...]

    def forward(self, x: Tensor) -> Tensor:
        return ((self._clipped(x) - self.mean) / self.deviation).clamp(-_CLIP, _CLIP)  # [B, ...]

    def _mean(self, demonstrated: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        """The mean [...] of a function of numbers [M, ...], float64. Pieces keep memory small."""
        total = torch.zeros(demonstrated.shape[1:], dtype=torch.float64)  # [...]
        for piece in torch.split(demonstrated, max(1, _PIECE // max(1, total.numel()))):
            total += of(self._clipped(piece).double()).sum(0)
        return total / len(demonstrated)

    def _clipped(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x.float(), self.low), self.high)  # [B, ...]


class Shown(nn.Module):
    """Observations and actions as one tree of float32 numbers, so that there are steps between any
    two: those of a Box normalized, choices as one-hot vectors. Action masks are left out."""

    def __init__(
        self, observation_space: Space, action_space: Space, demonstrations: Demonstrations
    ) -> None:
        super().__init__()
        self._places: list[tuple[int, Path]] = []  # 0: in observations, 1: in actions
        leaves: list[nn.Module] = []
        shapes: list[tuple[int, ...]] = []
        trees = (demonstrations.observations, demonstrations.actions)
        found = (observed_leaves(observation_space), dict(space_leaves(action_space)))
        for side, tree in enumerate(trees):
            for path, leaf in found[side].items():
                self._places.append((side, path))
                if isinstance(leaf, spaces.Box):
                    leaves.append(Normalized(leaf, at(tree, path)))
                    shapes.append(leaf.shape)
                    continue
                if isinstance(leaf, spaces.MultiBinary):
                    encoder: Numbers | OneHot = Numbers(leaf)
                else:
                    assert isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete))
                    encoder = OneHot(leaf)
                leaves.append(encoder)
                shapes.append((encoder.size,))
        self.leaves = nn.ModuleList(leaves)
        self.space = spaces.Dict(
            {
                str(index): spaces.Box(-_CLIP, _CLIP, shape, np.float32)
                for index, shape in enumerate(shapes)
            }
        )

    def forward(self, observations: Any, actions: Any) -> dict[str, Tensor]:
        """Trees [B, ...] -> by the keys of `space`, [B, ...] each."""
        trees = observations, actions
        return {
            str(index): leaf(at(trees[side], path))
            for index, ((side, path), leaf) in enumerate(
                zip(self._places, self.leaves, strict=True)
            )
        }
