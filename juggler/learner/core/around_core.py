"""AroundCore: a core around another one, which changes what that one learns from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from juggler.learner.core.learner_core import (
    ALONE,
    Aux,
    Columns,
    Grads,
    LearnerCore,
    Metrics,
    Params,
    Seam,
    Space,
    StepOutput,
)
from juggler.learner.core.state import arrays_like, tensors_like
from juggler.learner.data.sources import DataSource
from juggler.runtime.wire.trees import Tree


class AroundState(TypedDict):
    """The states of a core and of the one around it."""

    inner: Any
    own: dict[str, Any]  # a tree of tensors


class AroundCore(LearnerCore[AroundState], ABC):
    """Has another core learn from changed samples, and learns something from each sample itself.

    A subclass says what it keeps (`own_state`), what it shows the inner core (`shown`), and what it
    learns before that (`learned`). Everything else is passed on, priorities of a replay among it:
    so a sample is read from its source once, by whoever is outermost.
    """

    kind: str
    """For the core's name; its branch in checkpoints."""

    def __init__(self, inner: LearnerCore[Any]) -> None:
        """Args:
        inner: learns from what this core shows it.
        """
        self.inner = inner
        self.name = f"{inner.name} with {self.kind}"
        self.config, self.trains_on = inner.config, inner.trains_on
        self.trains_in_groups, self.schedules = inner.trains_in_groups, inner.schedules

    @abstractmethod
    def own_state(self, seed: int) -> dict[str, Any]:
        """What this core keeps from update to update: a tree of tensors on the CPU."""

    @abstractmethod
    def shown(self, state: AroundState, sample: Columns) -> Columns:
        """What the inner core learns from, by what this core knows already."""

    @abstractmethod
    def learned(
        self, state: AroundState, sample: Columns, seam: Seam
    ) -> tuple[dict[str, Any], Columns, Metrics]:
        """Learn from a sample -> what this core keeps from now on, what the inner core learns from,
        and metrics.

        All learners of a group send the same through the seam, whatever their samples have.
        """

    def data_source(self, seed: int = 0) -> DataSource:
        return self.inner.data_source(seed)

    def init(self, seed: int) -> AroundState:
        return AroundState(inner=self.inner.init(seed), own=self.own_state(seed))

    def grads(self, state: AroundState, sample: Columns) -> tuple[Grads, Aux]:
        return self.inner.grads(state["inner"], self.shown(state, sample))

    def apply(self, state: AroundState, grads: Grads, aux: Aux) -> StepOutput[AroundState]:
        output = self.inner.apply(state["inner"], grads, aux)
        return output._replace(state=AroundState(inner=output.state, own=state["own"]))

    def step(
        self, state: AroundState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[AroundState]:
        return self._around(state, sample, seam, self.inner.step)

    def step_in_parts(
        self,
        state: AroundState,
        sample: Columns,
        seam: Seam,
        minibatches: int | None,
        epochs: int | None,
    ) -> StepOutput[AroundState]:
        def in_parts(inner: Any, shown: Columns, seam: Seam) -> StepOutput[Any]:
            return self.inner.step_in_parts(inner, shown, seam, minibatches, epochs)

        return self._around(state, sample, seam, in_parts)

    def batch_spaces(self) -> tuple[Space, Space] | None:
        return self.inner.batch_spaces()

    def critic_space(self) -> Space | None:
        return self.inner.critic_space()

    def initial_state(self) -> dict[str, Any]:
        return self.inner.initial_state()

    def get_params(self, state: AroundState) -> Params:
        return self.inner.get_params(state["inner"])

    def with_weights(
        self, state: AroundState, weights: Mapping[str, Tree], seed: int, *, whole: bool = False
    ) -> AroundState:
        """What this core knows of its samples goes on."""
        inner = self.inner.with_weights(state["inner"], weights, seed, whole=whole)
        return AroundState(inner=inner, own=state["own"])

    def state_to_tree(self, state: AroundState) -> dict[str, Tree]:
        return {**self.inner.state_to_tree(state["inner"]), self.kind: arrays_like(state["own"])}

    def state_from_tree(self, tree: Tree, like: AroundState) -> AroundState:
        rest: dict[str, Any] = dict(tree) if isinstance(tree, Mapping) else {}
        own = tensors_like({self.kind: rest.pop(self.kind, {})}, {self.kind: like["own"]})
        inner = self.inner.state_from_tree(rest, like["inner"])
        return AroundState(inner=inner, own=own[self.kind])

    def _around(
        self,
        state: AroundState,
        sample: Columns,
        seam: Seam,
        step: Callable[[Any, Columns, Seam], StepOutput[Any]],
    ) -> StepOutput[AroundState]:
        own, shown, found = self.learned(state, sample, seam)
        output = step(state["inner"], shown, seam)
        metrics = {**output.metrics, **found}
        return output._replace(state=AroundState(inner=output.state, own=own), metrics=metrics)
