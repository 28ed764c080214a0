"""Algorithms of one's own that are wrong or slow, and populations."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import juggler
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import Forward, Loss, MakeModule
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.population import Population
from juggler.learner.data.collate import collate
from juggler.learner.data.replay.replay import Replay
from juggler.runtime.modules.rl_module import Batch, RLModule
from support.batches import TWO, VECTOR, MakeBatch


class Fails(Impala):
    def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
        raise KeyError("advantages")


class TellsSteps(Impala):
    """Fails with the number of steps that it is to learn from."""

    def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
        raise RuntimeError(f"{int(columns['live'].sum())} steps")


class NotANumber(Impala):
    """Its loss is never finite."""

    def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
        found = super().loss(forward, columns, state)
        infinite = {**found.metrics, "policy_loss": found.metrics["policy_loss"] / 0.0}
        return found._replace(total=found.total * float("nan"), metrics=infinite)


class KeepsNothing(Impala):
    """Its replay gets no row of what arrives."""

    def data_source(self, seed: int = 0) -> Replay:
        return Replay(rows=lambda columns: {}, capacity=100, size=4, ratio=1.0, seed=seed)


class Keeping(juggler.Algorithm):
    config, core = ImpalaConfig, KeepsNothing


class TellsRows(juggler.Dqn):
    """Fails with the number of rows that it is to learn from."""

    def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
        raise RuntimeError(f"{len(columns['live'])} rows drawn")


class ColumnOfValues(juggler.ActorCritic):
    """Returns values [B, 1]."""

    def _forward_train(self, batch: Any) -> dict[str, Any]:
        outputs = super()._forward_train(batch)
        return {**outputs, "values": outputs["values"].unsqueeze(-1)}


class TooFewNumbers(torch.nn.Module):
    """Claims more features than it has, while it learns."""

    size = 3

    def __init__(self, observation_space: Any, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = x.flatten(1)[:, :3] * self.weight  # [B, 3]
        return features[:, :2] if torch.is_grad_enabled() else features


class Slow(juggler.ActorCritic):
    """Learns nothing until a signal interrupts it."""

    def _forward_train(self, batch: Any) -> dict[str, Any]:
        threading.Event().wait(100)
        return super()._forward_train(batch)


class Telling(juggler.Algorithm):
    config, core, module = juggler.DqnConfig, TellsRows, juggler.QNetwork
    off_policy = True


class Failing(juggler.Algorithm):
    config, core = ImpalaConfig, Fails


class Counting(juggler.Algorithm):
    config, core = ImpalaConfig, TellsSteps


class Infinite(juggler.Algorithm):
    config, core = ImpalaConfig, NotANumber


class Learning(juggler.Algorithm):
    config, core = ImpalaConfig, Impala


def many(*arguments: Any) -> Population:
    return Population(Impala(*arguments), size=2)


class Many(juggler.Algorithm):
    config, core = ImpalaConfig, "support.own_algorithms:many"


RATES = np.geomspace(1e-5, 1e-2, 16).tolist()


class Small(RLModule):
    """A policy and a value function on one hidden layer."""

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
