"""Population: many learners of one algorithm that train together in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from juggler.learner.core.gradient_core import GradientCore, TrainState
from juggler.learner.core.learner_core import (
    ALONE,
    Aux,
    Columns,
    Grads,
    LearnerCore,
    Params,
    Seam,
    Space,
    StepOutput,
    given,
)
from juggler.learner.core.sequences import padded_truncations, without_segments
from juggler.learner.core.state import StateMismatch, arrays_like, tensors_like
from juggler.learner.data.sources import CircularBuffer, DataSource, Queue
from juggler.runtime.modules import columns as c
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree


class PopulationState(TypedDict):
    """The states of M members, and the hyper-parameters in which they differ."""

    members: TrainState  # with M in front of every shape
    hyperparameters: dict[str, Tensor]  # [M] float64 each, by key of the config


class Population(LearnerCore[PopulationState]):
    """Trains M members of one algorithm under `torch.func.vmap`.

    Members differ in initial parameters, hyper-parameters or both, and learn from the same sample
    or each from its own. Up to rounding, a member does what the algorithm alone would do.

    Gradients, parameters, the members' own samples and the whole state have M as their first
    dimension. The metric "loss" of member 3 is "loss[3]". A seam is called within vmap, once for
    all members, and sees the shapes of one member.

    Args:
        size: M; not needed with hyper-parameters.
        hyperparameters: M values by key, instead of the config's. Possible for keys with a
            schedule, such as "lr", and for numbers that the loss reads, such as "gamma" and
            "clip", unless the config sets them to none.
        same_start: whether all members start with the same parameters.
        own_samples: whether each member learns from a sample of its own, see `stacked`.

    Raises:
        ValueError: the size or a hyper-parameter is impossible, or vmap cannot map the core.
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
        if not isinstance(core, GradientCore):
            raise ValueError(
                f"{core.name} ({type(core).__name__}) cannot be in a population: it is not a "
                "GradientCore. Give the population the algorithm alone. A core around another one "
                "goes around the population, if it can be around any core; Rnd and Discriminator "
                "cannot"
            )
        values = {key: _checked(core, key, each) for key, each in (hyperparameters or {}).items()}
        sizes = {len(each) for each in values.values()} | ({size} if size is not None else set())
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError(
                f"a population needs one size above 0: size = {size}, and hyperparameters of "
                f"lengths {[len(each) for each in values.values()]}"
            )
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
        if core.module.get_initial_state():
            raise ValueError(
                f"{type(core.module).__name__} has a state, and cannot be in a population: the "
                "lengths of its sequences have to be read from the data. Train its members as "
                "separate learners"
            )
        (self.size,) = sizes
        self._has_mapped = False  # vmap can map the core
        self.name = f"population of {core.name}"
        self.trains_on, self.config = core.trains_on, core.config
        self._core, self._hyperparameters, self._same_start = core, values, same_start
        self._sample_dim = 0 if own_samples else None

    def data_source(self, seed: int = 0) -> DataSource:
        return self._core.data_source(seed)

    def batch_spaces(self) -> tuple[Space, Space] | None:
        return None if self._sample_dim == 0 else self._core.batch_spaces()

    def critic_space(self) -> Space | None:
        return self._core.critic_space()

    def init(self, seed: int) -> PopulationState:
        """Initialize member i with `seed + i`, or all with `seed`."""
        values = {
            key: torch.tensor(each, dtype=torch.float64)  # [M]
            for key, each in self._hyperparameters.items()
        }
        members = [
            _member(self._core, {key: x[index] for key, x in values.items()}).init(
                seed + (0 if self._same_start else index)
            )
            for index in range(self.size)
        ]
        return PopulationState(members=tree_map(_stack, *members), hyperparameters=values)

    def grads(self, state: PopulationState, sample: Columns) -> tuple[Grads, Aux]:
        def grads(core: GradientCore, state: TrainState, sample: Columns) -> Any:
            gradient, aux = core.grads(state, sample)
            return gradient, given(aux)

        gradients, aux = self._mapped(grads, state, sample, self._sample_dim)  # [M, P]
        return gradients, Aux(**aux)

    def apply(self, state: PopulationState, grads: Grads, aux: Aux) -> StepOutput[PopulationState]:
        def apply(core: GradientCore, state: TrainState, found: Any) -> Any:
            return given(core.apply(state, found["gradient"], Aux(**found["aux"])))

        return self._output(state, apply, {"gradient": grads, "aux": given(aux)}, 0)

    def step(
        self, state: PopulationState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[PopulationState]:
        def step(core: GradientCore, state: TrainState, sample: Columns) -> Any:
            return given(core.step(state, sample, seam))

        return self._output(state, step, sample, self._sample_dim)

    def member(self, state: PopulationState, index: int) -> TrainState:
        """Copy one member's state, from which the algorithm alone can continue."""
        member: TrainState = tree_map(lambda x: x[index].clone(), state["members"])
        return member

    def get_params(self, state: PopulationState) -> Params:
        """Parameters and buffers [M, ...] of all members."""
        params: Params = torch.func.vmap(self._core.get_params)(state["members"])
        return params

    def state_to_tree(self, state: PopulationState) -> dict[str, Tree]:
        members = {
            str(index): self._core.state_to_tree(self.member(state, index))
            for index in range(self.size)
        }
        return {"members": members, "hyperparameters": arrays_like(state["hyperparameters"])}

    def state_from_tree(self, tree: Tree, like: PopulationState) -> PopulationState:
        branches = tree if isinstance(tree, Mapping) else {}
        members = branches.get("members")
        if not isinstance(members, Mapping) or members.keys() != {*map(str, range(self.size))}:
            there = len(members) if isinstance(members, Mapping) else "no"
            raise StateMismatch(f"the checkpoint has {there} members; here there are {self.size}")
        restored = [
            self._core.state_from_tree(members[str(index)], self.member(like, index))
            for index in range(self.size)
        ]
        # A file of arrays does not keep branches that are empty.
        rest: Tree = {"hyperparameters": branches.get("hyperparameters", {})}
        values = tensors_like(rest, {"hyperparameters": like["hyperparameters"]})
        return PopulationState(
            members=tree_map(_stack, *restored), hyperparameters=values["hyperparameters"]
        )

    def _mapped(self, function: Any, state: PopulationState, inputs: Any, dim: int | None) -> Any:
        """Map a function of (a member's core, its state, its inputs)."""

        def of_member(state: TrainState, values: dict[str, Tensor], inputs: Any) -> Any:
            return function(_member(self._core, values), state, inputs)

        vmapped = torch.func.vmap(of_member, (0, 0, dim))
        try:
            mapped = vmapped(state["members"], state["hyperparameters"], inputs)
        except RuntimeError as error:
            if self._has_mapped or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"{type(self._core.module).__name__} cannot be in a population: torch.func.vmap "
                f"cannot map {self._core.name} with it (its buffers are "
                f"{[*state['members']['buffers']]}): {error}"
            ) from error
        self._has_mapped = True
        return mapped

    def _output(
        self, state: PopulationState, function: Any, inputs: Any, dim: int | None
    ) -> StepOutput[PopulationState]:
        found = self._mapped(function, state, inputs, dim)
        apart = {
            f"{name}[{index}]": value
            for name, of_all in found["metrics"].items()
            for index, value in enumerate(of_all.unbind())  # M x []
        }
        # Members draw together: a row counts as much as it does to the one with most to learn.
        priorities = found["priorities"].amax(0) if "priorities" in found else None  # [N]
        new = PopulationState(members=found["state"], hyperparameters=state["hyperparameters"])
        return StepOutput(new, apart, priorities)


def stacked(samples: Sequence[Columns]) -> Columns:
    """Stack the samples of M members along a new first dimension.

    All must have the same rows and steps. If their numbers of truncated episodes differ, some are
    repeated. Segments are left out, because only modules with a state read them.

    Raises:
        ValueError: the samples differ in their shapes.
    """
    most = max(len(each[c.FINAL_ROWS]) for each in samples)
    padded = (without_segments(padded_truncations(each, most)) for each in samples)
    together: Columns = tree_map(_stack, *padded)
    return together


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)  # [M, ...]


def _member(core: GradientCore, values: Mapping[str, Tensor]) -> GradientCore:
    """Copy the core with a member's values [] in schedules and config."""
    dtype = next(x.dtype for x in core.module.parameters() if x.requires_grad)
    member = copy.copy(core)
    member.mapped = True
    # In the dtype of the parameters: like a number, they must not promote the loss.
    numbers: Any = {key: x.to(dtype) for key, x in values.items() if key not in core.schedules}
    member.config = replace(core.config, **numbers)
    fixed = {key: (lambda _, x=x: x) for key, x in values.items() if key in core.schedules}
    member.schedules = {**core.schedules, **fixed}
    return member


def _checked(core: GradientCore, key: str, numbers: Sequence[float]) -> list[float]:
    """The values of a hyper-parameter, one for each member.

    Raises:
        ValueError: they are no numbers, members cannot differ in this key, or a value is out of
            range.
    """
    keys = [*core.schedules, *core.config.numbers_of_losses()]
    try:
        values = [float(value) for value in numbers]
    except (TypeError, ValueError):
        raise ValueError(
            f"hyperparameters: {key} = {numbers!r}: must be a list with a number for each member"
        ) from None
    if key not in keys:
        is_none = getattr(core.config, key, key) is None
        raise ValueError(
            f"hyperparameters: {key!r} is none in the config of {core.name}; set it there to a "
            "number, so that members may have others"
            if is_none
            else f"hyperparameters: members of {core.name} cannot differ in {key!r}"
            f"{nearest(key, keys)}"
        )
    for value in values if hasattr(core.config, key) else ():
        changed: dict[str, Any] = {key: value}
        try:
            replace(core.config, **changed).validate()
        except ValueError as error:
            raise ValueError(f"hyperparameters: {error}") from None
    return values
