"""Population: many learners of one algorithm that train together in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
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
    Metrics,
    Params,
    Seam,
    Space,
    StepOutput,
)
from juggler.learner.core.state import StateMismatch, arrays_like, tensors_like
from juggler.learner.core.varying_columns import padded_truncations, without_segments
from juggler.learner.data.sources import CircularBuffer, DataSource, Queue
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree


class PopulationState(TypedDict):
    """The states of M members, and the hyper-parameters in which they differ."""

    members: TrainState  # with M in front of every shape
    hyperparameters: dict[str, Tensor]  # [M] float64 each, by key of the config


class Population(LearnerCore[PopulationState]):
    """M members of one algorithm under `torch.func.vmap`: each operation runs once for all members.

    Members differ in their initial parameters, in their hyper-parameters, or in both. All learn
    from the same sample, or each from its own. Up to rounding, a member does what the algorithm
    alone would do from that member's state.

    Gradients, parameters, the members' own samples and the whole state have M as their first
    dimension. The metric "loss" of member 3 is "loss[3]". A seam is called within vmap, once for
    all members, and sees the shapes of one member.
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
                out of range, or vmap cannot map the core, its module or the config.
        """
        if not isinstance(core, GradientCore):
            raise ValueError(
                f"{core.name} ({type(core).__name__}) cannot be in a population: it is not a "
                "GradientCore. Give the population the algorithm alone. A core around another one "
                "goes around the population, if it can be around any core; Rnd and Discriminator "
                "cannot"
            )
        given = {key: _checked(core, key, each) for key, each in (hyperparameters or {}).items()}
        sizes = {len(values) for values in given.values()} | ({size} if size is not None else set())
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError(
                f"a population needs one size above 0: size = {size}, and hyperparameters of "
                f"lengths {[len(values) for values in given.values()]}"
            )
        _check_module(core.module)
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
        self.trains_on, self.config = core.trains_on, core.config
        self._core, self._hyperparameters, self._same_start = core, given, same_start
        self._sample_dim = 0 if own_samples else None

    def data_source(self, seed: int = 0) -> DataSource:
        return self._core.data_source(seed)

    def batch_spaces(self) -> tuple[Space, Space] | None:
        return None if self._sample_dim == 0 else self._core.batch_spaces()

    def critic_space(self) -> Space | None:
        return self._core.critic_space()

    def init(self, seed: int) -> PopulationState:
        """Member i starts like the algorithm alone with `seed + i`, or with `seed` if all start the
        same."""
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
            return gradient, aux.given()

        gradients, aux = self._mapped(grads, state, sample)  # [M, P]
        return gradients, Aux(**aux)

    def apply(self, state: PopulationState, grads: Grads, aux: Aux) -> StepOutput[PopulationState]:
        def apply(core: GradientCore, state: TrainState, found: Any) -> Any:
            output = core.apply(state, found["gradient"], Aux(**found["aux"]))
            return output.state, output.metrics, {}

        found = {"gradient": grads, "aux": aux.given()}
        return self._output(state, *self._mapped(apply, state, found, found_dim=0))

    def step(
        self, state: PopulationState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[PopulationState]:
        def step(core: GradientCore, state: TrainState, sample: Columns) -> Any:
            output = core.step(state, sample, seam)
            priorities = {} if output.priorities is None else {"priorities": output.priorities}
            return output.state, output.metrics, priorities

        return self._output(state, *self._mapped(step, state, sample))

    def member(self, state: PopulationState, index: int) -> TrainState:
        """A copy of one member's state, which the algorithm alone can continue from."""
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
        # Earlier versions kept each member's state by the id of its module.
        own = {
            key: each.get(DEFAULT_MODULE, each) if isinstance(each, Mapping) else each
            for key, each in members.items()
        }
        restored = [
            self._core.state_from_tree(own[str(index)], self.member(like, index))
            for index in range(self.size)
        ]
        # A file of arrays does not keep branches that are empty.
        rest: Tree = {"hyperparameters": branches.get("hyperparameters", {})}
        values = tensors_like(rest, {"hyperparameters": like["hyperparameters"]})
        return PopulationState(
            members=tree_map(_stack, *restored), hyperparameters=values["hyperparameters"]
        )

    def _mapped(
        self, function: Any, state: PopulationState, given: Any, found_dim: int | None = None
    ) -> Any:
        """The results of a function of (a member's core, its state, what is given)."""

        def of_member(state: TrainState, values: dict[str, Tensor], given: Any) -> Any:
            return function(_member(self._core, values), state, given)

        in_dims = (0, 0, self._sample_dim if found_dim is None else found_dim)
        vmapped = torch.func.vmap(of_member, in_dims)
        return vmapped(state["members"], state["hyperparameters"], given)

    def _output(
        self, state: PopulationState, members: TrainState, metrics: Metrics, found: Params
    ) -> StepOutput[PopulationState]:
        apart = {
            f"{name}[{index}]": value
            for name, of_all in metrics.items()
            for index, value in enumerate(of_all.unbind())  # M x []
        }
        # Members draw together: a row counts as much as it does to the one with most to learn.
        priorities = found["priorities"].amax(0) if found else None  # [N]
        new = PopulationState(members=members, hyperparameters=state["hyperparameters"])
        return StepOutput(new, apart, priorities)


def stacked(samples: Sequence[Columns]) -> Columns:
    """Stack the samples of M members into one, with M as the first dimension.

    All must have the same rows and steps. Where they differ in their number of truncated episodes,
    some of these are repeated. Segments are left out, because only modules with a state read them.

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
    """A copy of the core for use within `torch.func.vmap`, with values [] by key that replace those
    of its schedules and its config."""
    dtype = next(x.dtype for x in core.module.parameters() if x.requires_grad)
    fixed = {key: partial(_fixed, x) for key, x in values.items() if key in core.schedules}
    # In the dtype of the parameters: like a number, they must not promote the loss.
    numbers: dict[str, Any] = {key: x.to(dtype) for key, x in values.items() if key not in fixed}
    member = copy.copy(core)
    member.mapped = True
    member.config = replace(core.config, **numbers)
    member.schedules = {**core.schedules, **fixed}
    return member


def _fixed(value: Tensor, steps: Tensor) -> Tensor:
    """A schedule with a constant value []."""
    return value


def _checked(core: GradientCore, key: str, given: Sequence[float]) -> list[float]:
    """The values of a hyper-parameter, one for each member.

    Raises:
        ValueError: they are no numbers, members cannot differ in this key, or a value is out of
            range.
    """
    try:
        values = [float(value) for value in given]
    except (TypeError, ValueError):
        raise ValueError(
            f"hyperparameters: {key} = {given!r}: must be a list with a number for each member"
        ) from None
    keys = [*core.schedules, *core.config.numbers_of_losses()]
    if key not in keys:
        if getattr(core.config, key, key) is None:
            raise ValueError(
                f"hyperparameters: {key!r} is none in the config of {core.name}; set it there to a "
                "number, so that members may have others"
            )
        raise ValueError(
            f"hyperparameters: members of {core.name} cannot differ in {key!r}{nearest(key, keys)}"
        )
    for value in values if hasattr(core.config, key) else ():
        changed: dict[str, Any] = {key: value}
        try:
            replace(core.config, **changed).validate()
        except ValueError as error:
            raise ValueError(f"hyperparameters: {error}") from None
    return values


def _check_module(module: RLModule) -> None:
    """Raises:
    ValueError: vmap cannot map a module's training pass.
    """
    what = type(module).__name__
    if module.get_initial_state():
        raise ValueError(
            f"{what} has a state, and cannot be in a population: the lengths of its sequences have "
            "to be read from the data. Train its members as separate learners"
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
            f"{what} cannot be in a population: torch.func.vmap cannot map its training pass"
            f"{f' (its buffers are {buffers})' if buffers else ''}: {error}"
        ) from error
