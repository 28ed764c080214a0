"""GradientCore: all of an algorithm but its loss."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Self, get_type_hints

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from juggler.learner.config import LearnerConfig
from juggler.learner.core.forward import Forward as Forward
from juggler.learner.core.forward import Loss as Loss
from juggler.learner.core.forward import (
    NamedColumns,
    checked_loss,
    gradient_for_vmap,
    gradient_of,
)
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
from juggler.learner.core.mean_metrics import mean_metrics
from juggler.learner.core.sequences import with_recurring_shapes
from juggler.learner.core.state_trees import (
    StateMismatch,
    arrays_like,
    tensors_like,
    to_device,
)
from juggler.learner.data.collate import some_rows
from juggler.learner.data.sources import NEW_STEPS
from juggler.learner.optim.flat_module import FlatModule as FlatModule
from juggler.learner.optim.flat_module import MakeModule as MakeModule
from juggler.learner.optim.flat_module import TrainingPass, seeded
from juggler.learner.optim.flat_module import TrainState as TrainState
from juggler.learner.optim.optimizers import Optimizers, Schedule, chosen, on_host
from juggler.runtime.checkpoints.weights import ACTING
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.near_matches import nearest
from juggler.runtime.tracing import TraceCache
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree

#: Keys for the number of loss computations in an update, if an algorithm has them.
_PASSES = ("minibatches", "epochs")


class GradientCore(LearnerCore[TrainState], ABC):
    """A LearnerCore that minimizes a loss.

    An algorithm is a subclass with a `name` and a `loss`. The loss finds its hyper-parameters in
    `config`, or in `schedules` if they change with the steps trained on.

    If a gradient is not finite, the state does not change, and the metric `skipped` is 1. Neither
    does it change after a sample without a live step.

    Attributes:
        module: for its spaces and distribution. Its own parameters are not trained.
        flat: places of the module's parameters in a vector.
        optimizers: optimizers of the parameters.
    """

    name: str

    trains_on: frozenset[str] = frozenset({"episodes", "batch"})

    trains_in_groups = True

    schedules: dict[str, Callable[[Tensor], Tensor]]
    """By key of the config: steps trained on -> the current value, both 0-d."""

    learns_from_episodes: bool = False
    """Whether a batch of columns must have all the columns of a batch of episodes."""

    learns_from_rewards: bool = True
    """Whether the loss depends on rewards."""

    mean_names: tuple[str, ...] = ()
    """Names of `Loss.means`."""

    counts_each: bool = False
    """Whether the optimizer counts updates per parameter, because some updates change only some."""

    _parts: tuple[int | None, int | None] = (None, None)  # see `in_parts`

    mapped: bool = False
    """Whether this core runs within `torch.func.vmap`, as a member of a population."""

    def __init__(self, make_module: MakeModule, config: LearnerConfig) -> None:
        """Make a module to check it, and keep its structure.

        Args:
            make_module: makes the module with newly drawn parameters.
            config: the hyper-parameters.

        Raises:
            ValueError: a hyper-parameter is out of range, or the module is not trainable.
            TypeError: `make_module` is not a function, or `config` is another algorithm's.
        """
        if not hasattr(self, "name"):
            raise ValueError(f"{type(self).__name__} needs a name, which its checkpoints carry")
        # Types that only a type checker imports cannot be checked.
        with suppress(NameError):
            needed = get_type_hints(type(self)).get("config", LearnerConfig)
            is_class = isinstance(needed, type) and needed is not Any
            if is_class and not isinstance(config, needed):
                raise TypeError(
                    f"{type(self).__name__}: config is of type {type(config).__name__}; give it "
                    f"one of type {needed.__name__}, with the keys that its loss reads"
                )
        config.validate()
        for table, around in (("intrinsic", "Rnd"), ("imitation", "Discriminator")):
            if getattr(config, table):
                raise ValueError(
                    f"{table} = {getattr(config, table)!r} with {self.name}: a core has no rewards "
                    f"of its own. Put juggler.{around}(core, ...) around it"
                )
        # Kept whole: losses read their keys from it.
        self.config = config
        # Older scripts passed functions by module id. A module is callable, too.
        if not callable(make_module) or isinstance(make_module, RLModule):
            raise TypeError(
                f"{type(self).__name__}: give one function that makes one module, not a "
                f"{type(make_module).__name__}; a core trains one module"
            )
        # Only the structure is used: each state has its own parameters.
        self._make_module = make_module
        self.module: RLModule = self._made(0)
        self._pass = TrainingPass(
            self.module, bfloat16=config.precision == "bfloat16", compiled=config.compile
        )
        self.flat = FlatModule(self.module, self._pass)
        specs = config.optimizer_specs()
        self.optimizers = Optimizers(self.flat, specs)
        self.schedules = {spec.lr_key: Schedule(spec.config.lr) for spec in reversed(specs)}
        self._traces = None if config.compile or _has_others_code(self) else TraceCache()

    # -- an algorithm's methods ------------------------------------------------------------------

    @abstractmethod
    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        """Compute the loss on a sample.

        Args:
            forward: the module's training pass, with the parameters to differentiate.
            columns: the sample.
            state: the state before this update; its tensors need no gradient.

        Returns:
            A `Loss`. `grads` raises a ValueError for anything else.
        """

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        """Return the initial `extra`: the algorithm's state apart from parameters [P]."""
        return {}

    def next_extra(self, new: TrainState, aux: Aux) -> dict[str, Tensor]:
        """Return the `extra` after an optimizer step; `new` has the old one."""
        return new["extra"]

    def extra_after(self, new: TrainState, aux: Aux, stepped: Tensor) -> dict[str, Tensor]:
        """Return `next_extra` if the optimizer stepped, bool [], else the old `extra`."""
        return chosen(stepped, self.next_extra(new, aux), new["extra"])

    def acting_parameters(self, state: TrainState) -> Tensor:
        """Return parameters [P] for EnvRunners and policies: the trained ones."""
        return state["parameters"]

    def exploration(self, state: TrainState) -> dict[str, Tensor]:
        """Return buffers that control exploration by EnvRunners, for any loss.

        Args:
            state: the state before the step.

        Returns:
            Values [] by the names of the module's buffers, such as "epsilon". They are metrics too.
            {}: the algorithm sets no such buffer.
        """
        return {}

    def moving(self, state: TrainState, live_steps: Tensor) -> Tensor:
        """Return which parameters an optimizer step changes, bool [K] or [].

        K follows `flat.sizes`; [] means all. Other parameters keep their moments too. A core that
        returns [K] sets `counts_each`.

        Args:
            state: the state before the step.
            live_steps: [], the number of live steps in the sample.
        """
        return live_steps > 0  # []

    def must_keep_each_step(self, table: str) -> None:
        """Check that a wrapper can reward each kept step separately.

        Args:
            table: the wrapper's table of keys.

        Raises:
            ValueError: kept steps, or terminations, cannot be distinguished.
        """

    def decided(self, state: TrainState) -> bool | None:
        """Return a built-in loss's decision by a number of the state.

        None: it decides nothing, or the host cannot read the number.
        """
        return None

    def passes(self) -> tuple[int, int]:
        """Return minibatches and epochs of a step, from `in_parts` or the config."""
        parts, own = self._parts, [getattr(self.config, key, 1) for key in _PASSES]
        return parts[0] or own[0], parts[1] or own[1]

    def reads(self, x: Tensor) -> bool:
        """Return whether the host can read a tensor without waiting."""
        return on_host(x) and not self.mapped

    # -- module ----------------------------------------------------------------------------------

    def forward(self, state: TrainState) -> Forward:
        """Return the training pass with a state's parameters and copied buffers."""
        buffers = {name: buffer.clone() for name, buffer in state["buffers"].items()}
        return Forward(self.flat, state["parameters"], buffers)

    def batch_spaces(self) -> tuple[Space, Space] | None:
        if not self.learns_from_episodes:
            return None
        return self.module.observation_space, self.module.action_space

    def critic_space(self) -> Space | None:
        return self.module.critic_space

    def initial_state(self) -> dict[str, Any]:
        return self.module.get_initial_state()

    def _made(self, seed: int) -> RLModule:
        with seeded(seed, DEFAULT_MODULE):
            return self._make_module()

    # -- state -----------------------------------------------------------------------------------

    def init(self, seed: int) -> TrainState:
        return self._beginning(*self.flat.flatten(self._made(seed)), seed)

    def get_params(self, state: TrainState) -> Params:
        sent = self.acting_parameters(state)  # [P]
        rounded = self.config.weights_dtype == "bfloat16" and sent.dtype == torch.float32
        return self.flat.acting(sent.bfloat16() if rounded else sent.clone(), state["buffers"])

    def with_weights(
        self, state: TrainState, weights: Mapping[str, Tree], seed: int, *, whole: bool = False
    ) -> TrainState:
        tensors = {**self.flat.named(state["parameters"]), **state["buffers"]}
        if not weights and not whole:
            return state  # nothing changes, moments included
        found: dict[str, Tensor] = {}
        for name, array in weights.items():
            if name not in self.flat.names:
                raise StateMismatch(
                    f"there are no weights {name!r}{nearest(name, self.flat.names)}"
                )
            # A tensor may have several names, and then has one value.
            own = self.flat.names[name]
            tensor = _tensor_of(name, array, tensors[own])  # [...]
            if tensor.isnan().any():
                raise StateMismatch(f"weights {name!r} have NaN")
            if not torch.equal(found.setdefault(own, tensor), tensor):
                raise StateMismatch(f"weights {name!r} and {own!r} are one, and have two values")
        if whole and (missing := [name for name in tensors if name not in found]):
            raise StateMismatch(f"weights are missing for {', '.join(map(repr, missing))}")
        tensors.update(found)
        parameters = self.flat.joined({name: tensors.pop(name) for name in self.flat.sizes})  # [P]
        begun = self._beginning(parameters, tensors, seed)
        begun["steps"] = state["steps"]
        there: TrainState = to_device(begun, state["parameters"].device)
        return there

    def shares_parts(self, state: TrainState) -> TrainState:
        """Prepare a state for parts shared with other cores.

        The optimizer then counts the updates of each parameter.
        """
        self.counts_each = True
        return _counting_each(state)

    def state_to_tree(self, state: TrainState) -> dict[str, Tree]:
        named = self.flat.by_name(state)
        acting = self.acting_parameters(state)  # [P]
        if acting is not state["parameters"]:
            named[ACTING] = self.flat.named(acting)
        return arrays_like(named, copied=True)

    def state_from_tree(self, tree: Tree, like: TrainState) -> TrainState:
        if isinstance(tree, Mapping):
            tree = {name: branch for name, branch in tree.items() if name != ACTING}
        return self.flat.from_names(tensors_like(tree, self.flat.by_name(like)))

    def _beginning(self, parameters: Tensor, buffers: dict[str, Tensor], seed: int) -> TrainState:
        """Make an untrained module's state with these parameters [P] and buffers."""
        begun = TrainState(
            parameters=parameters,
            buffers=buffers,
            moments=self.optimizers.init(parameters),
            extra=self.initial_extra(parameters, seed),
            steps=torch.zeros((), dtype=torch.int64),  # []
        )
        return _counting_each(begun) if self.counts_each else begun

    # -- updates ---------------------------------------------------------------------------------

    def grads(self, state: TrainState, sample: Columns) -> tuple[Grads, Aux]:
        calls = self._pass.compiled_calls
        parts = micro_batches(sample, self.config.micro_batches)
        total: dict[str, Any] = {}
        live_steps: Any = 0
        priorities = []
        for part in parts:
            gradient, loss, buffers = self._gradient(part, state)  # [P]
            found = {"gradient": gradient, "metrics": loss.metrics, "means": loss.means}
            if len(parts) > 1:  # means over parts become means over the sample
                found = tree_map(lambda x, steps=loss.live_steps: x * steps, found)
            # Only one part's graph of gradients is in memory at once.
            total = tree_map(torch.add, total, found) if total else found
            live_steps = live_steps + loss.live_steps  # []
            if loss.priorities is not None:
                priorities.append(loss.priorities)
            state = TrainState(**{**state, "buffers": buffers})
        if len(parts) > 1:
            total = tree_map(lambda x: x / live_steps.clamp(min=1), total)
        # Shows whether passes still run compiled code.
        if self.config.compile:
            calls = self._pass.compiled_calls - calls
            total["metrics"]["compiled_calls"] = torch.full_like(live_steps, calls)  # []
        return total["gradient"], Aux(
            live_steps=live_steps,
            metrics=total["metrics"],
            buffers=state["buffers"],
            means=total["means"],
            priorities=torch.cat(priorities) if priorities else None,  # [N]
            new_steps=sample.get(NEW_STEPS),  # []
        )

    @torch.no_grad()
    def apply(self, state: TrainState, grads: Grads, aux: Aux) -> StepOutput[TrainState]:
        inputs = {"state": state, "gradient": grads, "aux": given(aux)}
        if self._traces is None or self.mapped or on_host(grads):
            found = self._stepped(inputs)
        else:
            before = {"state": state}
            found = self._traces(self._stepped, inputs, self._basis(), before=before)
        if taken := aux.metrics.keys() & found["metrics"].keys():
            where, name = f"{type(self).__name__}.loss", min(taken)
            raise ValueError(f"{where}: the optimizer has a metric {name!r}; choose another name")
        return StepOutput(found["state"], {**aux.metrics, **found["metrics"]}, aux.priorities)

    def in_parts(self, minibatches: int | None, epochs: int | None) -> Self:
        core = copy.copy(self)
        core._parts = minibatches, epochs
        return core

    def step(
        self, state: TrainState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[TrainState]:
        """Make one update, in minibatches and epochs.

        Minibatches are consecutive rows, so estimates along a row are not cut. Schedules count each
        step once, however often it is learned from.
        """
        count, epochs = self.passes()
        if count == epochs == 1:
            return self.apply(state, *seam.gradients(*self.grads(state, sample)))
        parts = micro_batches(sample, count)
        # Learners of a group make the same number of steps, even if a sample has fewer rows.
        in_group = getattr(seam, "in_group", False)  # a user's own seam may not have it
        silent = [_silenced(parts[0])] * (count - len(parts)) if in_group else []
        before, each = state["steps"], []
        state = copied(state)  # if the seam fails midway, the old state is unchanged
        for _ in range(epochs):
            priorities = []  # of the last epoch
            for part in parts:
                state, metrics, found = super().step(state, part, seam)
                each.append(metrics)
                if found is not None:
                    priorities.append(found)  # [n]
            # Parts that only others have: this learner adds nothing to their gradients.
            for part in silent:
                state = super().step(state, part, seam).state
        state["steps"] = before + (state["steps"] - before) // epochs  # []
        together = torch.cat(priorities) if priorities else None  # [N]
        return StepOutput(state, mean_metrics(each), together)

    def _stepped(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Make an optimizer step; return a tree with state and metrics."""
        old, gradient, aux = inputs["state"], inputs["gradient"], Aux(**inputs["aux"])  # [P]
        lrs = {key: self.schedules[key](old["steps"]) for key in self.optimizers.lr_keys}  # []
        norm = torch.linalg.vector_norm(gradient)  # []
        finite = norm.isfinite()  # []
        # Decided on the device, so that the host does not wait.
        moved = finite & self.moving(old, aux.live_steps)  # [] or [K]
        counts = old["moments"].get("updates", moved)  # [], or [P]
        if moved.ndim and not counts.ndim:
            raise ValueError(
                f"{type(self).__name__}.moving tells parameters apart, whose updates are counted "
                "together: set counts_each = True in that class"
            )
        parameters, moments = self.optimizers.update(
            old["parameters"], gradient, norm, old["moments"], lrs, moved, self.reads(gradient)
        )
        # Without a step, nothing else changes either.
        stepped = moved.any()  # []
        counted = aux.live_steps if aux.new_steps is None else aux.new_steps  # []
        new = TrainState(
            parameters=parameters,
            buffers=chosen(stepped, aux.buffers, old["buffers"]),
            moments=moments,
            extra=old["extra"],
            steps=old["steps"] + stepped * counted,
        )
        # Last, since the algorithm's state may follow the new parameters.
        if new["extra"]:
            new["extra"] = self.extra_after(new, aux, stepped)
        return {
            "state": new,
            "metrics": {"grad_norm": norm, **lrs, "skipped": (~finite).float()},
        }

    def _basis(self) -> object:
        """Return everything except tensors that traced operations depend on."""
        config = {key: value for key, value in vars(self.config).items() if key not in _PASSES}
        return config, dict(self.schedules)

    def _gradient(
        self, columns: Columns, state: TrainState
    ) -> tuple[Tensor, Loss, dict[str, Tensor]]:
        """Return the gradient [P], the loss, and the new buffers."""
        if self.mapped:
            forward = Forward(self.flat, state["parameters"], state["buffers"])
            return gradient_for_vmap(partial(self._loss, columns=columns, state=state), forward)
        inputs = {"state": state, "columns": columns}
        if self._traces is None:
            found = self._computed(inputs)
        else:
            if not self.module.get_initial_state():
                inputs["columns"] = with_recurring_shapes(columns)
            found = self._traces(self._computed, inputs, self._basis(), self.decided(state))
        return found["gradient"], Loss(**found["loss"]), found["buffers"]

    def _computed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of `_gradient` as a tree of tensors."""
        state = inputs["state"]
        forward = Forward(self.flat, state["parameters"], state["buffers"]).differentiable()
        loss = self._loss(forward, inputs["columns"], state)
        gradient = gradient_of(loss.total, forward)  # [P]
        found = given(loss._replace(total=loss.total.detach()))
        return {"gradient": gradient, "loss": found, "buffers": forward.buffers}

    def _loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        """Compute and check the loss, with `exploration` in buffers and metrics."""
        explores = self.exploration(state)  # [] each
        for name, value in explores.items():
            forward.set_buffer(name, value)
        found = self.loss(forward, NamedColumns(columns), state)
        where = f"{type(self).__name__}.loss"
        checked = checked_loss(where, found, columns, self.mean_names, mapped=self.mapped)
        return checked._replace(metrics={**explores, **checked.metrics})


def copied(state: TrainState) -> TrainState:
    """Clone a state, so that optimizer steps do not change the original."""
    copy: TrainState = tree_map(torch.clone, state)
    return copy


def _silenced(part: Columns) -> Columns:
    """Return a sample's part with all steps marked as not live."""
    counted = [name for name in (c.LIVE, NEW_STEPS) if name in part]
    return {**part, **{name: torch.zeros_like(part[name]) for name in counted}}


def _counting_each(state: TrainState) -> TrainState:
    """Add update counts per parameter to a state."""
    parameters = state["parameters"]
    moments = {
        name: moment.expand_as(parameters).to(parameters.dtype, copy=True)
        for name, moment in state["moments"].items()
    }
    return TrainState(**{**state, "moments": moments})


def _tensor_of(name: str, array: object, like: Tensor) -> Tensor:
    """Convert a weight array to a tensor like the one it replaces.

    Raises:
        StateMismatch: the array does not fit.
    """
    if isinstance(array, np.ndarray) and array.dtype == ml_dtypes.bfloat16:
        array = array.astype(np.float32)  # [...] rounded by weights_dtype = "bfloat16"
    if not isinstance(array, np.ndarray):
        raise StateMismatch(f"weights {name!r} are a {type(array).__name__}, not an array")
    if array.shape != like.shape:
        raise StateMismatch(
            f"weights {name!r} have shape {array.shape}; expected {tuple(like.shape)}"
        )
    tensor = torch.tensor(array)  # [...] a copy
    if tensor.dtype != like.dtype:
        raise StateMismatch(f"weights {name!r} are {tensor.dtype}; expected {like.dtype}")
    return tensor.to(like.device)


def _has_others_code(core: GradientCore) -> bool:
    """Return whether user code computes the loss, and so may read anything."""
    parts = [core, core.config, *core.module.modules(), core.module.action_distribution()]
    owners = {type(part).__module__.partition(".")[0] for part in parts}
    return not owners <= {"juggler", "torch"}


def micro_batches(columns: Columns, count: int) -> list[Columns]:
    """Split columns into parts with about the same number of rows.

    Parts without a segment are omitted: there is nothing to learn from. The host waits for the
    device, because it reads which truncations and segments belong to a part.

    Args:
        columns: [N, ...], or [K] or [S] with row indices, as `collate` makes them.
        count: number of parts, limited to the number of rows.
    """
    if count == 1:
        return [columns]
    n = len(columns[c.LIVE])
    count = min(count, n)
    parts = [
        some_rows(columns, place * n // count, (place + 1) * n // count) for place in range(count)
    ]
    return [x for x in parts if len(x.get(c.SEGMENT_ROWS, x[c.LIVE]))] or [columns]
