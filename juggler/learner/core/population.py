"""Population: many learners of one algorithm that train together in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
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
from juggler.learner.core.state_trees import StateMismatch
from juggler.learner.data.sources import CircularBuffer, DataSource, Queue
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.distributions.base import Constants
from juggler.runtime.near_matches import nearest
from juggler.runtime.wire.structures import tree_leaves, tree_map
from juggler.runtime.wire.trees import Tree

T = TypeVar("T")


class Population(LearnerCore[TrainState]):
    """Trains M members of one algorithm under `torch.func.vmap`.

    Members differ in initial parameters, hyper-parameters or both, and learn from the same sample
    or each from its own. Up to rounding, a member trains like a single learner.

    The state is the algorithm's, with M in front of every shape. This also applies to gradients,
    parameters and the members' own samples. The metric "loss" of member 3 is "loss[3]". A seam is
    called within vmap, once for all members, and sees the shapes of one member.

    Args:
        size: M; not needed with hyper-parameters.
        hyperparameters: M values by key, instead of the config's. Supported are keys with a
            schedule, such as "lr", and numbers that the loss reads, such as "gamma" and
            "clip", unless the config sets them to none.
        same_start: whether all members start with the same parameters.
        own_samples: whether each member learns from its own sample, see `stacked`.

    Raises:
        ValueError: the size or a hyper-parameter is invalid, or vmap cannot map the core.
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
        _must_be_mappable(core, own_samples)
        try:
            values = {key: _checked(core, key, x) for key, x in (hyperparameters or {}).items()}
        except ValueError as error:
            raise ValueError(f"hyperparameters: {error}") from None
        sizes = {len(each) for each in values.values()} | ({size} if size is not None else set())
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError(
                f"a population needs one size above 0: size = {size}, and hyperparameters of "
                f"lengths {[len(each) for each in values.values()]}"
            )
        (self.size,) = sizes
        # A learner, and a core around this one, see what the algorithm alone would show.
        self.name = f"population of {core.name}"
        self.trains_on, self.config = core.trains_on, core.config
        self._core, self._keys, self._same_start = core, tuple(values), same_start
        self._values = Constants(*map(np.array, values.values()))  # [M] each
        self._sample_dim = 0 if own_samples else None

    def data_source(self, seed: int = 0) -> DataSource:
        return self._core.data_source(seed)

    def batch_spaces(self) -> tuple[Space, Space] | None:
        return None if self._sample_dim == 0 else self._core.batch_spaces()

    def critic_space(self) -> Space | None:
        return self._core.critic_space()

    def init(self, seed: int) -> TrainState:
        """Initialize member i with `seed + i`, or all with `seed`."""
        values = self._values_on(torch.device("cpu"))
        cores = [
            _member(self._core, {key: x[index] for key, x in values.items()})
            for index in range(self.size)
        ]
        step = 0 if self._same_start else 1
        return _stacked([core.init(seed + step * index) for index, core in enumerate(cores)])

    def grads(self, state: TrainState, sample: Columns) -> tuple[Grads, Aux]:
        def grads(core: GradientCore, state: TrainState, sample: Columns) -> Any:
            gradient, aux = core.grads(state, sample)
            return gradient, given(aux)

        gradients, aux = self._mapped(grads, state, sample, self._sample_dim)  # [M, P]
        return gradients, Aux(**aux)

    def apply(self, state: TrainState, grads: Grads, aux: Aux) -> StepOutput[TrainState]:
        def apply(core: GradientCore, state: TrainState, found: Any) -> Any:
            return given(core.apply(state, found["gradient"], Aux(**found["aux"])))

        return _output(self._mapped(apply, state, {"gradient": grads, "aux": given(aux)}, 0))

    def step(
        self, state: TrainState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[TrainState]:
        def step(core: GradientCore, state: TrainState, sample: Columns) -> Any:
            return given(core.step(state, sample, seam))

        return _output(self._mapped(step, state, sample, self._sample_dim))

    def member(self, state: TrainState, index: int) -> TrainState:
        """Copy one member's state, to continue with the plain algorithm."""
        member: TrainState = tree_map(lambda x: x[index].clone(), state)
        return member

    def get_params(self, state: TrainState) -> Params:
        """Return parameters and buffers [M, ...] of all members."""
        params: Params = torch.func.vmap(self._core.get_params)(state)
        return params

    def state_to_tree(self, state: TrainState) -> dict[str, Tree]:
        members = (self.member(state, index) for index in range(self.size))
        return {"members": {str(i): self._core.state_to_tree(x) for i, x in enumerate(members)}}

    def state_from_tree(self, tree: Tree, like: TrainState) -> TrainState:
        """Restore all members; hyper-parameters are not restored."""
        trees: Any = tree.get("members", {}) if isinstance(tree, Mapping) else {}
        if len(trees) != self.size:
            raise StateMismatch(
                f"the checkpoint has {len(trees) or 'no'} members; here there are {self.size}"
            )
        members = [self.member(like, index) for index in range(self.size)]
        own = (self._core.state_from_tree(trees.get(str(i)), x) for i, x in enumerate(members))
        return _stacked([*own])

    def _values_on(self, device: torch.device) -> dict[str, Tensor]:
        """Return hyper-parameters [M], by key."""
        return dict(zip(self._keys, self._values.on(device), strict=True))

    def _mapped(self, function: Any, state: TrainState, inputs: Any, dim: int | None) -> Any:
        """Map a function of (a member's core, state and inputs)."""

        def of_member(state: TrainState, values: dict[str, Tensor], inputs: Any) -> Any:
            return function(_member(self._core, values), state, inputs)

        if dim == 0 and any(x.shape[:1] != (self.size,) for _, x in tree_leaves(inputs)):
            raise ValueError(f"own_samples: give juggler.stacked(...) of {self.size} samples")
        try:
            values = self._values_on(state["steps"].device)
            return torch.func.vmap(of_member, (0, 0, dim))(state, values, inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"{type(self._core.module).__name__} cannot be in a population: torch.func.vmap "
                f"cannot map {self._core.name} with it (its buffers are {[*state['buffers']]}): "
                f"{error}"
            ) from error


def stacked(samples: Sequence[Columns]) -> Columns:
    """Stack the samples of M members along a new first dimension.

    All must have the same number of rows and steps. If their numbers of truncated episodes differ,
    some are repeated. Segments are omitted, because only modules with a state read them.

    Raises:
        ValueError: the samples differ in their shapes.
    """
    if len({each[c.REWARDS].shape for each in samples}) != 1:
        raise ValueError("samples must have the same number of rows and steps, and be at least one")
    most = max(len(each[c.FINAL_ROWS]) for each in samples)
    return _stacked([without_segments(padded_truncations(each, most)) for each in samples])


def _stacked(trees: Sequence[T]) -> T:
    """Stack M trees of tensors -> [M, ...]."""
    together: T = tree_map(lambda *xs: torch.stack(xs), *trees)
    return together


def _output(found: Mapping[str, Any]) -> StepOutput[TrainState]:
    """Make a StepOutput of all members, with each member's metrics."""
    metrics = {
        f"{name}[{index}]": value
        for name, of_all in found["metrics"].items()
        for index, value in enumerate(of_all.unbind())  # M x []
    }
    # Members draw together: a row has the priority of the member with the most to learn.
    priorities = found["priorities"].amax(0) if "priorities" in found else None  # [N]
    return StepOutput(found["state"], metrics, priorities)


def _member(core: GradientCore, values: Mapping[str, Tensor]) -> GradientCore:
    """Copy the core with a member's values [] in schedules and config."""
    dtype = next(x.dtype for x in core.module.parameters() if x.requires_grad)
    member = copy.copy(core)
    member.mapped = True
    # In the dtype of the parameters, so that they do not promote the loss.
    numbers: Any = {key: x.to(dtype) for key, x in values.items() if key not in core.schedules}
    member.config = replace(core.config, **numbers)
    fixed = {key: (lambda _, x=x: x) for key, x in values.items() if key in core.schedules}
    member.schedules = {**core.schedules, **fixed}
    return member


def _must_be_mappable(core: LearnerCore[Any], own_samples: bool) -> None:
    """Raise ValueError if torch.func.vmap cannot map one pass over all members."""
    if not isinstance(core, GradientCore):
        raise ValueError(
            f"{getattr(core, 'name', core)} ({type(core).__name__}) cannot be in a population: it "
            "is not a GradientCore. Give the population the algorithm alone. A core around "
            "another one goes around the population, if it can be around any core; Rnd and "
            "Discriminator cannot"
        )
    if core.config.compile:
        raise ValueError("compile = true: nothing is compiled under vmap; set it to false")
    if own_samples and core.config.micro_batches > 1:
        raise ValueError(
            f"micro_batches = {core.config.micro_batches}: vmap cannot split members' samples; "
            "set it to 1"
        )
    # Draws of one replay cannot differ between members.
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


def _checked(core: GradientCore, key: str, numbers: Sequence[float]) -> list[float]:
    """Return the values of a hyper-parameter, one per member.

    Raises:
        ValueError: they are not numbers, members cannot differ in this key, or a value is out of
            range.
    """
    keys = [*core.schedules, *core.config.numbers_of_losses()]
    if key not in keys:
        is_none = getattr(core.config, key, key) is None
        why = ", which is none in the config: set it to a number" if is_none else nearest(key, keys)
        raise ValueError(f"members of {core.name} cannot differ in {key!r}{why}")
    # Anything that float() takes will do: it becomes a number of a tensor.
    try:
        values = [float(value) for value in numbers]
    except (TypeError, ValueError):
        what = f"{key} = {numbers!r}: must be a list with a number for each member"
        raise ValueError(what) from None
    for value in values if hasattr(core.config, key) else ():
        changed: dict[str, Any] = {key: value}
        replace(core.config, **changed).validate()
    return values
