"""Small cores and states, and what algorithms are tried with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

import juggler
from juggler.learner.algorithms.off_policy import OffPolicyConfig
from juggler.learner.algorithms.r2d2 import R2d2Config
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.data.collate import collate
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map
from juggler.testing import sample_for
from support.batches import TWO, VECTOR, MakeBatch


def make_core(name: str, kind: Any = None, **config: Any) -> GradientCore:
    package, _, attribute = ALGORITHMS[name].core.partition(":")
    core = getattr(importlib.import_module(package), attribute)
    model: dict[str, Any] = {"hidden_sizes": [8, 8]}
    if needs_memory(name):
        model |= {"recurrent": "gru", "recurrent_size": 8}
    if keeps_steps(name):
        # Few updates; a row of what needs a memory has several steps, so that fewer come to one.
        ratio = 4.0 if needs_memory(name) else 1.0
        config = {"replay_begin": 0, "replay_batch_size": 8, "replay_ratio": ratio, **config}
    elif name == "ppo":
        config = {"epochs": 2, "minibatches": 2, **config}
    make = partial(
        build_module, kind or ALGORITHMS[name].module, VECTOR, action_space_of(name), model
    )
    made: GradientCore = core(make, ALGORITHMS[name].config(**config))
    return made


def samples_of(make_batch: MakeBatch, count: int) -> list[Any]:
    state = {"hidden": torch.ones(4, 8)}  # [N, 8]
    return [
        {**collate([make_batch(4, 8, seed=seed)]), "states": {"module": state}}
        for seed in range(count)
    ]


def drawn_rows(taken: Tensor) -> dict[str, Any]:
    """Transitions with these actions, as a replay draws them; the third terminated."""
    generator, count = torch.Generator().manual_seed(3), len(taken)
    discounts = torch.full((count, 1), 0.9)
    discounts[2] = 0.0
    return {
        "observations": torch.randn((count, 1, 4), generator=generator),
        "actions": taken.unsqueeze(1),
        "live": torch.ones((count, 1), dtype=torch.bool),
        "rewards": torch.randn((count, 1), generator=generator),
        "discounts": discounts,
        "last_observations": torch.randn((count, 4), generator=generator),
    }


def copied(state: Any) -> Any:
    """The same state in separate tensors: a step may change it."""
    return tree_map(torch.clone, state)


class Doubled:
    """A module with a flat tensor of all parameters, in float64.

    Args:
        module: whose parameters these become.
        parameters: [P]
    """

    def __init__(self, module: RLModule, parameters: Tensor) -> None:
        rest = parameters.detach().double()
        for parameter in module.parameters():
            parameter.data = rest[: parameter.numel()].view_as(parameter).clone()
            rest = rest[parameter.numel() :]
        assert not rest.numel()
        self.module = module.double()

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of `forward_train`, whose specs would have float32."""
        exact = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
        # Layers turn what they see into float32.
        with patch.object(Tensor, "float", Tensor.double):
            outputs: dict[str, Any] = self.module._forward_train(exact)
        assert all("64" in str(x.dtype) for x in outputs.values())
        return outputs


def slow_penalties(
    logit: Callable[[np.ndarray], float], some: np.ndarray, others: np.ndarray, shares: np.ndarray
) -> np.ndarray:
    """Gradient penalties [B] of rows [B, F], by central differences in float64."""
    found = []
    for x, y, share in zip(some, others, shares, strict=True):
        between = share * x + (1 - share) * y
        slopes = [
            (logit(between + step) - logit(between - step)) / 2e-5 for step in 1e-5 * np.eye(len(x))
        ]
        found.append((np.linalg.norm(slopes) - 1) ** 2)
    return np.array(found)


MODULE = partial(
    juggler.ActorCritic,
    gymnasium.spaces.Box(-1, 1, (3,)),
    gymnasium.spaces.Discrete(2),
    {"hidden_sizes": [4]},
)
SAMPLE = sample_for(MODULE())


class SquaredValues(juggler.GradientCore):
    """Minimizes the square of values."""

    name = "squared values"

    def loss(
        self, forward: juggler.Forward, columns: juggler.Columns, state: juggler.TrainState
    ) -> juggler.Loss:
        _, values, _, live = juggler.actor_critic_pass(forward, columns)
        mean = juggler.LiveMean(live)
        total = mean(values.square())  # []
        return juggler.Loss(total, mean.live_steps, {"loss": total.detach()}, means={})


#: Has 0 and 1 among its actions, so that batches of choices between two are batches of this, too.
NUMBER = spaces.Box(-0.5, 1.5, (), np.float32)


def acts_in_choices(algorithm: str) -> bool:
    """Whether an algorithm that ships can choose between Discrete actions."""
    kinds = ALGORITHMS[algorithm].action_spaces
    return not kinds or spaces.Discrete in kinds


def action_space_of(algorithm: str) -> gymnasium.Space[Any]:
    """A space for a shipped algorithm, with actions 0 and 1."""
    return TWO if acts_in_choices(algorithm) else NUMBER


def keeps_steps(algorithm: str) -> bool:
    """Whether an algorithm that ships draws from steps that it keeps."""
    return issubclass(ALGORITHMS[algorithm].config, OffPolicyConfig)


def needs_memory(algorithm: str) -> bool:
    """Whether an algorithm that ships trains only modules with a state."""
    return issubclass(ALGORITHMS[algorithm].config, R2d2Config)
