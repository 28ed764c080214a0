"""Population: many learners of one algorithm that take their steps together, in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypedDict

import torch
from torch import Tensor

from juggler.learner.core.gradient_core import GradientCore, State
from juggler.learner.core.learner_core import (
    ALONE,
    Aux,
    Columns,
    Grads,
    LearnerCore,
    Metrics,
    Params,
    Sample,
    Seam,
    Space,
    StepOutput,
)
from juggler.learner.core.state import StateMismatch, arrays_like, tensors_like
from juggler.learner.data.sources import DataSource
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree


class PopulationState(TypedDict):
    """The states of M members, and what they differ by."""

    members: State  # with M in front of every shape
    hyperparameters: dict[str, Tensor]  # [M] float64 each, by key of the config


class Population(LearnerCore[PopulationState]):
    """M members of one algorithm, under `torch.func.vmap`: one operation does for all of them what
    it would do for each.

    Members differ in the parameters they start with, in their hyper-parameters, or in both. They
    learn from one sample together, or from one of their own each. What one member does is, up to
    rounding, what the algorithm would do by itself from that member's state.

    Gradients, samples of members' own and all of the state have M in front of their shapes.
    Parameters and metrics are by module id and member, as `member_id` names them. A seam is called
    within vmap, once for all members, and sees shapes as for one.
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
            core: what every member does.
            size: M; may be left out where there are hyper-parameters.
            hyperparameters: M values by key, in place of the config's: for what has a schedule,
                such as "lr", and for numbers that the loss reads, such as "gamma" and "clip", where
                they are not none in the config.
            same_start: all members start with the same parameters; else each with its own.
            own_samples: each member learns from a sample of its own, as `stacked` puts them
                together; else all from the same one.

        Raises:
            ValueError: there are no members, their numbers differ, members cannot differ in a key
                or have a value of it, or the core, a module or what the config asks for cannot be
                mapped by vmap.
        """
        if not isinstance(core, GradientCore):
            raise ValueError(
                f"{core.name} ({type(core).__name__}) cannot be in a population: it is no "
                "GradientCore. One around another core goes around the population instead"
            )
        given = {key: list(values) for key, values in (hyperparameters or {}).items()}
        for key, values in given.items():
            _check_values(core, key, values)
        sizes = {len(values) for values in given.values()} | ({size} if size is not None else set())
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError(
                f"a population needs one size above 0: size = {size}, and hyperparameters of "
                f"lengths {[len(values) for values in given.values()]}"
            )
        for module_id, module in core.modules.items():
            _check_module(module_id, module)
        if core.config.compile:
            raise ValueError("compile = true: nothing is compiled under vmap; set it to false")
        if own_samples and core.config.micro_batches > 1:
            raise ValueError(
                f"micro_batches = {core.config.micro_batches}: vmap cannot take members' samples "
                "apart; set it to 1"
            )
        (self.size,) = sizes
        self.name = f"population of {core.name}"
        self.trains_on = core.trains_on
        self.config = core.config
        self._core = core
        self._hyperparameters = given
        self._same_start = same_start
        self._sample_dim = 0 if own_samples else None

    def data_source(self) -> DataSource:
        return self._core.data_source()

    def init(self, seed: int) -> PopulationState:
        """Member i starts as the algorithm by itself does with seed + i, or with the seed where all
        have the same start."""
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
        """What a member does, for what is not mapped."""
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
        ) -> tuple[State, Metrics]:
            output = as_member(self._core, values).step(member, sample, seam)
            return output.state, output.metrics

        in_dims = (0, 0, self._sample_dim)
        members, values = state["members"], state["hyperparameters"]
        return self._output(state, *torch.func.vmap(of_member, in_dims)(members, values, sample))

    def member(self, state: PopulationState, index: int) -> State:
        """The state of one member, as one of the algorithm by itself, that goes on by itself."""
        member: State = tree_map(lambda x: x[index].clone(), state["members"])
        return member

    def batch_spaces(self) -> Mapping[str, tuple[Space, Space]]:
        return {} if self._sample_dim == 0 else self._core.batch_spaces()

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
    """What a member's module is called among those of all members."""
    return f"{module_id}[{index}]"


def stacked(samples: Sequence[Sample]) -> Sample:
    """Samples of M members as one, with M in front of every shape.

    They agree in rows and steps. Where they differ in how many episodes were truncated, some of
    those are named again. Segments are left out, which only modules with a state read.

    Raises:
        ValueError: the samples are of different modules or shapes.
    """
    padded = []
    for sample in samples:
        most = {key: max(len(each[key][c.FINAL_ROWS]) for each in samples) for key in sample}
        padded.append({key: _padded(columns, most[key]) for key, columns in sample.items()})
    together: Sample = tree_map(_stack, *padded)
    return together


def _padded(columns: Columns, truncated: int) -> dict[str, Any]:
    """A module's columns without segments, with so many truncated episodes."""
    kept = {name: x for name, x in columns.items() if name not in c.SEGMENTS}
    missing = truncated - len(kept[c.FINAL_ROWS])
    if not missing:
        return kept
    if len(kept[c.FINAL_ROWS]):
        last = {name: tree_map(lambda x: x[-1:], kept[name]) for name in c.FINALS}  # [1, ...]
    else:
        # What follows a row's last step anyway, where that is not truncated.
        steps = kept[c.LIVE].shape[1]
        last = {
            c.FINAL_ROWS: torch.zeros_like(kept[c.LIVE][:1, 0], dtype=torch.int64),  # [1]
            c.FINAL_STEPS: torch.full_like(kept[c.LIVE][:1, 0], steps - 1, dtype=torch.int64),
            c.FINAL_OBSERVATIONS: tree_map(lambda x: x[:1], kept[c.LAST_OBSERVATIONS]),
        }
    for name in c.FINALS:
        kept[name] = tree_map(
            lambda x, y: torch.cat([x, *[y] * missing]), kept[name], last[name]
        )  # [truncated, ...]
    return kept


def as_member(core: GradientCore, values: Mapping[str, Tensor]) -> GradientCore:
    """The same core for use within `torch.func.vmap`, with values [] by key in place of those of
    its schedules and of its config."""
    dtype = next(
        parameter.dtype
        for module in core.modules.values()
        for parameter in module.parameters()
        if parameter.requires_grad
    )
    fixed = {key: x for key, x in values.items() if key in core.schedules}
    # As a number would be: it does not make the losses of smaller parameters larger.
    numbers: dict[str, Any] = {key: x.to(dtype) for key, x in values.items() if key not in fixed}
    member = copy.copy(core)
    member.mapped = True
    member.config = replace(core.config, **numbers)
    member.schedules = {**core.schedules, **{key: partial(_fixed, x) for key, x in fixed.items()}}
    return member


def _fixed(value: Tensor, steps: Tensor) -> Tensor:
    """A value [] whatever the steps."""
    return value


def _check_values(core: GradientCore, key: str, values: Sequence[float]) -> None:
    """Raises:
    ValueError: members cannot differ in a key, or one of the values cannot be.
    """
    keys = [*core.schedules, *core.config.numbers_of_losses()]
    if key not in keys:
        if getattr(core.config, key, key) is None:
            raise ValueError(
                f"hyperparameters: {key!r} is none in the config of {core.name}; set it there to a "
                "number, as others may then be in its place"
            )
        raise ValueError(
            f"hyperparameters: members of {core.name} cannot differ in {key!r}{nearest(key, keys)}"
        )
    if hasattr(core.config, key):
        for value in values:
            changed: dict[str, Any] = {key: value}
            try:
                replace(core.config, **changed).validate()
            except ValueError as error:
                raise ValueError(f"hyperparameters: {error}") from None


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)  # [M, ...]


def _check_module(module_id: str, module: RLModule) -> None:
    """Raises:
    ValueError: vmap cannot map a module's training pass.
    """
    what = f"module {module_id!r} ({type(module).__name__})"
    if module.get_initial_state():
        raise ValueError(
            f"{what} has a state, and cannot be in a population: how long its sequences are has to "
            "be read from the data. Train its members as learners by themselves"
        )
    tensors = {
        name: torch.stack([tensor.detach()] * 2)  # [M = 2, ...]
        for name, tensor in chain(module.named_parameters(), module.named_buffers())
    }
    batch = {c.OBSERVATIONS: tree_map(torch.from_numpy, zeros(module.observation_space, (2,)))}

    def forward(tensors: dict[str, Tensor]) -> Any:
        outputs = torch.func.functional_call(module, tensors, (batch,))
        return {name: x for name, x in outputs.items() if isinstance(x, Tensor)}

    try:
        torch.func.vmap(forward)(tensors)
    except RuntimeError as error:
        buffers = [name for name, _ in module.named_buffers()]
        raise ValueError(
            f"{what} cannot be in a population, as torch.func.vmap cannot map its training pass"
            f"{f' (its buffers are {buffers})' if buffers else ''}: {error}"
        ) from error
