"""Algorithms of one's own, some of which cannot learn."""

from __future__ import annotations

import time
from typing import Any

import torch

import juggler
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import Forward, Loss
from juggler.learner.core.population import Population
from juggler.learner.data.replay.replay import Replay


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


class Standardizes(Impala):
    """Its loss is finite with several rows alone."""

    def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
        found = super().loss(forward, columns, state)
        rows = columns["rewards"].shape[0] * found.total.new_ones(())  # []
        return found._replace(total=found.total / (rows - 1))


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


class OfWrongPriorities(juggler.Dqn):
    """Its priorities have a dimension too many."""

    def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
        found = super().loss(forward, columns, state)
        assert found.priorities is not None
        return found._replace(priorities=found.priorities.unsqueeze(1))


class WaitsForMany(Impala):
    """Has a replay of its own, from which nothing is drawn for long."""

    def data_source(self, seed: int = 0) -> Replay:
        return Replay(
            lambda columns: {"live": columns["live"][columns["live"]].unsqueeze(1)},
            capacity=10**6,
            size=512,
            ratio=0.01,
            begin=10**6,
            selector="fifo",
            max_times_sampled=1,
            seed=seed,
        )

    def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
        raise RuntimeError(f"{len(columns['live'])} rows drawn")


class ColumnOfValues(juggler.ActorCritic):
    """Returns values [B, 1]."""

    def _forward_train(self, batch: Any) -> dict[str, Any]:
        outputs = super()._forward_train(batch)
        return {**outputs, "values": outputs["values"].unsqueeze(-1)}


class TooFewNumbers(torch.nn.Module):
    """An encoder that says it had more features than it has, and only where it learns."""

    size = 3

    def __init__(self, observation_space: Any, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = x.flatten(1)[:, :3] * self.weight  # [B, 3]
        return features[:, :2] if torch.is_grad_enabled() else features


class Slow(juggler.ActorCritic):
    """Learns nothing for long."""

    def _forward_train(self, batch: Any) -> dict[str, Any]:
        time.sleep(100)
        return super()._forward_train(batch)


class Telling(juggler.Algorithm):
    config, core, module = juggler.DqnConfig, TellsRows, juggler.QNetwork
    off_policy = True


class Misjudging(Telling):
    core = OfWrongPriorities


class Waiting(juggler.Algorithm):
    config, core = ImpalaConfig, WaitsForMany


class Failing(juggler.Algorithm):
    config, core = ImpalaConfig, Fails


class Counting(juggler.Algorithm):
    config, core = ImpalaConfig, TellsSteps


class Infinite(juggler.Algorithm):
    config, core = ImpalaConfig, NotANumber


class OfSeveralRows(juggler.Algorithm):
    config, core = ImpalaConfig, Standardizes


class Learning(juggler.Algorithm):
    config, core = ImpalaConfig, Impala


def many(*arguments: Any) -> Population:
    return Population(Impala(*arguments), size=2)


class Many(juggler.Algorithm):
    config, core = ImpalaConfig, "support.own_algorithms:many"
