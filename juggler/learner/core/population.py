"""Population: many learners of one algorithm that train together in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from juggler.learner.core.gradient_core import GradientCore, State
from juggler.learner.core.learner_core import (
    ALONE,
    Aux,
    Grads,
    LearnerCore,
    Metrics,
    Params,
    Sample,
    Seam,
    Space,
    StepOutput,
)
from juggler.learner.core.population_members import (
    as_member,
    check_module,
    check_values,
    numbers_of_members,
)
from juggler.learner.core.state import StateMismatch, arrays_like, tensors_like
from juggler.learner.core.varying_columns import padded_truncations, without_segments
from juggler.learner.data.sources import CircularBuffer, DataSource, Queue
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree


class PopulationState(TypedDict):
    """The states of M members, and the hyper-parameters in which they differ."""

    members: State  # with M in front of every shape
    hyperparameters: dict[str, Tensor]  # [M] float64 each, by key of the config


class Population(LearnerCore[PopulationState]):
    """M members of one algorithm under `torch.func.vmap`: each operation runs once for all members.

    Members differ in their initial parameters, in their hyper-parameters, or in both. All learn
    from the same sample, or each from its own. Up to rounding, a member does what the algorithm
    alone would do from that member's state.

    Gradients, the members' own samples and the whole state have M as their first dimension.
    Parameters and metrics are by module id and member, as `member_id` names them. A seam is called
    within vmap, once for all members, and sees the shapes of one member.
    """

    def __init__(
        self,
        core: GradientCore,
        *,
        size: int | None = None,
        hyperparameters: Mapping[str, Sequence[float]] | None = None,
        same_start: bool = False,
        own_samples: bool = False,
    ) -> None:
        """Args:
            core: the algorithm.
            size: M; not needed with hyper-parameters.
            hyperparameters: M values by key, instead of the config's. Possible for keys with a
                schedule, such as "lr", and for numbers that the loss reads, such as "gamma" and
                "clip", unless the config sets them to none.
            same_start: whether all members start with the same parameters.
            own_samples: whether each member learns from a sample of its own, see `stacked`.

        Raises:
            ValueError: the size is 0 or contradictory, members cannot differ in a key, a value is
                out of range, or vmap cannot map the core, a module or the config.
        """
        if not isinstance(core, GradientCore):
            raise ValueError(
                f"{core.name} ({type(core).__name__}) cannot be in a population: it is not a "
                "GradientCore. Give the population the algorithm alone. A core around another one "
                "goes around the population, if it can be around any core; Rnd and Discriminator "
                "cannot"
            )
        given = {key: numbers_of_members(key, x) for key, x in (hyperparameters or {}).items()}
        for key, values in given.items():
            check_values(core, key, values)
        sizes = {len(values) for values in given.values()} | ({size} if size is not None else set())
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError(
                f"a population needs one size above 0: size = {size}, and hyperparameters of "
                f"lengths {[len(values) for values in given.values()]}"
            )
        for module_id, module in core.modules.items():
            check_module(module_id, module)
        if core.config.compile:
            raise ValueError("compile = true: nothing is compiled under vmap; set it to false")
        if own_samples and core.config.micro_batches > 1:
            raise ValueError(
                f"micro_batches = {core.config.micro_batches}: vmap cannot split members' samples; "
                "set it to 1"
            )
        if own_samples and not isinstance(core.data_source(), Queue | CircularBuffer):
            raise ValueError(
                f"own_samples with {core.name}, whose source of data may keep steps and draw them "
                "for all members: leave own_samples out"
            )
        (self.size,) = sizes
        self.name = f"population of {core.name}"
        self.trains_on = core.trains_on
        self.config = core.config
        self._core = core
        self._hyperparameters = given
        self._same_start = same_start
        self._sample_dim = 0 if own_samples else None

    def data_source(self, seed: int = 0) -> DataSource:
        return self._core.data_source(seed)

    def init(self, seed: int) -> PopulationState:
        """Member i starts like the algorithm alone with `seed + i`, or with `seed` if all start the
        same."""
        seeds = [seed + (0 if self._same_start else index) for index in range(self.size)]
        return PopulationState(
            members=tree_map(
                _stack,
                *(self._own(index).init(each) for index, each in enumerate(seeds)),
            ),
            hyperparameters={
                key: torch.tensor(values, dtype=torch.float64)  # [M]
                for key, values in self._hyperparameters.items()
            },
        )

    def _own(self, index: int) -> GradientCore:
        """A member's core, for operations outside of vmap."""
        values = {key: torch.tensor(own[index]) for key, own in self._hyperparameters.items()}
        return as_member(self._core, values)

    def grads(self, state: PopulationState, sample: Sample) -> tuple[Grads, Aux]:
        def of_member(
            member: State, values: dict[str, Tensor], sample: Sample
        ) -> tuple[Grads, Aux]:
            return as_member(self._core, values).grads(member, sample)

        in_dims = (0, 0, self._sample_dim)
        members, values = state["members"], state["hyperparameters"]
        return torch.func.vmap(of_member, in_dims)(members, values, sample)

    def apply(self, state: PopulationState, grads: Grads, aux: Aux) -> StepOutput[PopulationState]:
        def of_member(
            member: State, values: dict[str, Tensor], grads: Grads, aux: Aux
        ) -> tuple[State, Metrics]:
            output = as_member(self._core, values).apply(member, grads, aux)
            return output.state, output.metrics

        members, values = state["members"], state["hyperparameters"]
        return self._output(state, *torch.func.vmap(of_member)(members, values, grads, aux))

    def step(
        self, state: PopulationState, sample: Sample, seam: Seam = ALONE
    ) -> StepOutput[PopulationState]:
        def of_member(
            member: State, values: dict[str, Tensor], sample: Sample
        ) -> tuple[State, Metrics, dict[str, Tensor]]:
            output = as_member(self._core, values).step(member, sample, seam)
            return output.state, output.metrics, output.priorities or {}

        in_dims = (0, 0, self._sample_dim)
        members, values = state["members"], state["hyperparameters"]
        members, metrics, priorities = torch.func.vmap(of_member, in_dims)(members, values, sample)
        output = self._output(state, members, metrics)
        # Members draw together: a row counts as much as it does to the one with most to learn.
        together = {key: each.amax(0) for key, each in priorities.items()}  # [N] each
        return output._replace(priorities=together or None)

    def member(self, state: PopulationState, index: int) -> State:
        """A copy of one member's state, which the algorithm alone can continue from."""
        member: State = tree_map(lambda x: x[index].clone(), state["members"])
        return member

    def batch_spaces(self) -> Mapping[str, tuple[Space, Space]]:
        return {} if self._sample_dim == 0 else self._core.batch_spaces()

    def critic_spaces(self) -> Mapping[str, Space]:
        return self._core.critic_spaces()

    def get_params(self, state: PopulationState) -> Params:
        members = [tree_map(lambda x, i=i: x[i], state["members"]) for i in range(self.size)]
        return {
            member_id(module_id, index): tensors
            for index, member in enumerate(members)
            for module_id, tensors in self._core.get_params(member).items()
        }

    def state_to_tree(self, state: PopulationState) -> dict[str, Tree]:
        return {
            "members": {
                str(index): self._core.state_to_tree(self.member(state, index))
                for index in range(self.size)
            },
            "hyperparameters": arrays_like(state["hyperparameters"]),
        }

    def state_from_tree(self, tree: Tree, like: PopulationState) -> PopulationState:
        branches = tree if isinstance(tree, Mapping) else {}
        members = branches.get("members")
        expected = {str(index) for index in range(self.size)}
        if not isinstance(members, Mapping) or members.keys() != expected:
            there = len(members) if isinstance(members, Mapping) else "no"
            raise StateMismatch(f"the checkpoint has {there} members; here there are {self.size}")
        # A file of arrays does not keep branches that are empty.
        rest: Tree = {"hyperparameters": branches.get("hyperparameters", {})}
        return PopulationState(
            members=tree_map(
                _stack,
                *(
                    self._core.state_from_tree(members[str(index)], self.member(like, index))
                    for index in range(self.size)
                ),
            ),
            hyperparameters=tensors_like(rest, {"hyperparameters": like["hyperparameters"]})[
                "hyperparameters"
            ],
        )

    def _output(
        self, state: PopulationState, members: State, metrics: Metrics
    ) -> StepOutput[PopulationState]:
        apart: Metrics = {
            member_id(module_id, index): {} for module_id in metrics for index in range(self.size)
        }
        for module_id, values in metrics.items():
            for name, of_all in values.items():
                for index, value in enumerate(of_all.unbind()):  # M x []
                    apart[member_id(module_id, index)][name] = value
        new = PopulationState(members=members, hyperparameters=state["hyperparameters"])
        return StepOutput(new, apart)


def member_id(module_id: str, index: int) -> str:
    """The id of a member's module among those of all members."""
    return f"{module_id}[{index}]"


def stacked(samples: Sequence[Sample]) -> Sample:
    """Stack the samples of M members into one, with M as the first dimension.

    All must have the same rows and steps. Where they differ in their number of truncated episodes,
    some of these are repeated. Segments are left out, because only modules with a state read them.

    Raises:
        ValueError: the samples differ in their modules or shapes.
    """
    padded = []
    for sample in samples:
        most = {key: max(len(each[key][c.FINAL_ROWS]) for each in samples) for key in sample}
        padded.append(
            {
                key: without_segments(padded_truncations(columns, most[key]))
                for key, columns in sample.items()
            }
        )
    together: Sample = tree_map(_stack, *padded)
    return together


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)  # [M, ...]
