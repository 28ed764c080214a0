"""Algorithms of one's own, some of which cannot learn."""

from __future__ import annotations

from typing import Any

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
