"""Cores of a small module, and what tests of populations compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import MakeModule
from juggler.learner.core.learner_core import Columns
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.rl_module import Batch, RLModule

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)
RATES = np.geomspace(1e-5, 1e-2, 16).tolist()


class Small(RLModule):
    """A policy and a value function on one hidden layer, in the dtype asked for."""

    def __init__(self, layer: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(VECTOR, TWO, {})
        self.body = nn.Sequential(nn.Linear(4, 8), layer or nn.Identity(), nn.Tanh())
        self.heads = nn.Linear(8, 3)
        self.to(dtype)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        observations = batch["observations"].to(self.heads.weight.dtype)  # [B, 4]
        outputs = self.heads(self.body(observations))  # [B, 3]
        return {"action_dist_inputs": outputs[:, :2], "values": outputs[:, 2]}


def make_core(make: MakeModule | None = None, **config: Any) -> Impala:
    return Impala(make or Small, ImpalaConfig(**config))


def in_float64(make_batch: MakeBatch, seed: int, **options: Any) -> Columns:
    columns = collate([make_batch(4, 9, seed=seed, **options)])
    # Observations stay as the space has them; the module casts them.
    return {**columns, **{name: columns[name].double() for name in ("rewards", "action_logp")}}


def assert_close(one: Any, other: Any, tolerance: float = 1e-9) -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        return
    assert one.keys() == other.keys()
    for key, branch in one.items():
        assert_close(branch, other[key], tolerance)


def assert_equal(one: Any, other: Any) -> None:
    assert_close(one, other, 0.0)


NUMBERS: dict[str, dict[str, list[float]]] = {
    "impala": {
        "gamma": [0.9, 0.99, 1.0],
        "lambda_": [0.5, 0.9, 1.0],
        "rho_bar": [1.0, 1.5, 3.0],
        "rho_bar_pg": [0.7, 1.0, 2.0],
        "c_bar": [0.4, 0.8, 1.0],
        "value_coefficient": [0.1, 0.5, 1.0],
        "reward_scale": [0.01, 0.1, 1.0],
    },
    "ppo": {
        "gamma": [0.9, 0.99, 1.0],
        "lambda_": [0.5, 0.9, 1.0],
        "clip": [0.05, 0.1, 0.3],
        "value_clip": [0.05, 0.2, 1.0],
        "target_kl": [1e-6, 0.01, 10.0],
    },
    "appo": {
        "gamma": [0.9, 0.99, 1.0],
        "clip": [0.05, 0.1, 0.3],
        "behaviour_clip": [1.0, 1.5, 2.0],
        "target_kl": [1e-6, 0.01, 10.0],
        "kl_coefficient": [0.1, 1.0, 2.0],
    },
}
