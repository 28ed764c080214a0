"""Modules with heads of their own on an encoder that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import nn

from juggler.runtime.modules.module_spec import RLModuleSpec
from juggler.runtime.modules.multi_rl_module import MultiRLModule
from juggler.runtime.modules.rl_module import Batch, RLModule

VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)
SHARED = "left+right"  # the unit of those two


class Headed(RLModule):
    """Heads of its own on an encoder that others may have too."""

    training_only = ("value",)

    def __init__(self, observation_space: Any, action_space: Any, encoder: nn.Module) -> None:
        super().__init__(observation_space, action_space, {})
        self.policy = nn.Linear(16, 2)
        self.encoder = encoder
        self.value = nn.Linear(16, 1)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        return {"action_dist_inputs": self.policy(self.encoder(batch["observations"]))}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        features = self.encoder(batch["observations"])  # [B, 16]
        return {
            "action_dist_inputs": self.policy(features),
            "values": self.value(features).squeeze(-1),
        }


class SharedEncoder(MultiRLModule):
    def build(self, specs: Mapping[str, RLModuleSpec]) -> Mapping[str, RLModule]:
        encoder = nn.Sequential(nn.Linear(4, 16), *self.normalization(), nn.Tanh())
        return {
            module_id: Headed(spec.observation_space, spec.action_space, encoder)
            for module_id, spec in specs.items()
        }

    def normalization(self) -> list[nn.Module]:
        return [nn.BatchNorm1d(16)]


class SharedPlainEncoder(SharedEncoder):
    """Without statistics of batches, which are others for parts of a batch."""

    def normalization(self) -> list[nn.Module]:
        return []


def make_multi(shared: type[SharedEncoder] = SharedEncoder) -> MultiRLModule:
    """Two that share their encoder, and one with an encoder of its own."""
    spec = RLModuleSpec(observation_space=VECTOR, action_space=TWO)
    multi = shared({"left": spec, "right": spec})
    alone = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
    multi.add("alone", Headed(VECTOR, TWO, alone))
    return multi
