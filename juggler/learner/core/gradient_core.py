"""GradientCore: all of an algorithm but its loss."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Self

import torch
from torch import Tensor

from juggler.learner.config import LearnerConfig
from juggler.learner.core.differentiation import functional_gradient_of, gradient_of
from juggler.learner.core.forward import Forward as Forward
from juggler.learner.core.forward import Loss as Loss
from juggler.learner.core.learner_core import (
    Aux,
    Columns,
    Grads,
    LearnerCore,
    Params,
    Sample,
    Seam,
    Space,
    StepOutput,
    UnitAux,
)
from juggler.learner.core.making_modules import Factories as Factories
from juggler.learner.core.making_modules import make_modules
from juggler.learner.core.mean_metrics import mean_metrics
from juggler.learner.core.micro_batches import MeanOverParts, micro_batches
from juggler.learner.core.starting_weights import with_weights
from juggler.learner.core.state import StateMismatch, arrays_like, as_sent, tensors_like, to_device
from juggler.learner.optim.group_optimizers import UnitOptimizers, check_patterns
from juggler.learner.optim.optimizer_groups import optimizer_groups
from juggler.learner.optim.parameter_group import Unit
from juggler.learner.optim.parameter_group_state import State as State
from juggler.learner.optim.parameter_group_state import UnitState as UnitState
from juggler.learner.optim.parameter_group_state import by_name, from_names
from juggler.learner.optim.schedules import Schedule
from juggler.learner.optim.training_pass import TrainingPass
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.trees import Tree


class GradientCore(LearnerCore[State], ABC):
    """A LearnerCore that minimizes a loss for each module.

    Modules that share parameters form one unit: its loss is the sum of theirs, and what they share
    takes one step of its optimizer. Every other module is a unit by its own id.

    An algorithm is a subclass with `loss`, which finds its hyper-parameters in `config`, and those
    that change with the steps trained on in `schedules`.

    If a gradient is not finite, its unit's state stays as it was, and the metric `skipped` is 1. So
    does what belongs only to modules without a live step in the sample, the optimizer's memory of
    it included.
    """

    name: str
    trains_on: frozenset[str]

    learns_from_episodes: bool = False
    """Whether a batch of columns has to be a whole batch of episodes, with all of its columns."""

    mean_names: tuple[str, ...] = ()
    """Of the means that `loss` returns."""

    schedules: dict[str, Callable[[Tensor], Tensor]]
    """By key of the config: steps trained on -> the value at present, both 0-d."""

    def __init__(self, factories: Factories, config: LearnerConfig) -> None:
        """Args:
            factories: by module id, what makes that module with freshly drawn parameters; or what
                makes a MultiRLModule.
            config: hyper-parameters, the same for all modules.

        Raises:
            ValueError: a hyper-parameter is out of its range, or a module cannot be trained.
        """
        config.validate()
        self.config = config
        self._factories = factories
        modules, groups = make_modules(factories, seed=0)
        if config.burn_in and not any(module.get_initial_state() for module in modules.values()):
            raise ValueError(
                f"burn_in = {config.burn_in}: no module has a state that could be warmed up"
            )
        self._pass = TrainingPass(bfloat16=config.precision == "bfloat16", compiled=config.compile)
        units = [
            Unit({module_id: modules[module_id] for module_id in ids}, self._pass) for ids in groups
        ]
        self._units = {unit.id: unit for unit in units}
        optimizers = optimizer_groups(config)
        check_patterns(units, optimizers)
        self._optimizers = {unit.id: UnitOptimizers(unit, optimizers) for unit in units}
        self.schedules = {group.lr_key: Schedule(group.config.lr) for group in reversed(optimizers)}
        self.schedules["entropy_coefficient"] = Schedule(config.entropy_coefficient)
        self._gradient = gradient_of

    @property
    def modules(self) -> dict[str, RLModule]:
        """By id, for their spaces and distributions; what they hold is not trained."""
        return {key: each for unit in self._units.values() for key, each in unit.modules.items()}

    @abstractmethod
    def loss(self, forward: Forward, columns: Columns, state: UnitState) -> Loss:
        """The loss of one module.

        Args:
            forward: the module's training pass, with the parameters that the loss is about.
            columns: the module's part of the sample.
            state: of its unit, before this update; its tensors take no gradient.
        """

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        """What the algorithm keeps beside of a unit with these parameters [P], at first."""
        return {}

    def next_extra(self, new: UnitState, aux: UnitAux) -> dict[str, Tensor]:
        """The same after a step of the optimizer, from the state after it (its `extra` is still
        that from before)."""
        return new["extra"]

    def init(self, seed: int) -> State:
        modules, _ = make_modules(self._factories, seed)
        return {
            unit_id: self._beginning(unit, *unit.flatten(modules), seed)
            for unit_id, unit in self._units.items()
        }

    def forward(self, state: State, module_id: str) -> Forward:
        """The training pass of a module with the parameters and copies of the buffers of a state.

        Raises:
            ValueError: there is no such module.
        """
        self._must_know([module_id])
        unit = next(unit for unit in self._units.values() if module_id in unit.modules)
        own = state[unit.id]
        buffers = {name: buffer.clone() for name, buffer in own["buffers"].items()}
        return Forward(unit, module_id, own["parameters"], buffers)

    def grads(self, state: State, sample: Sample) -> tuple[Grads, Aux]:
        self._must_know(sample)
        grads: Grads = {}
        aux: Aux = {}
        for unit_id, unit in self._units.items():
            parts = {
                module_id: sample[module_id] for module_id in unit.modules if module_id in sample
            }
            if not parts:
                continue
            calls = self._pass.compiled_calls
            grads[unit_id], aux[unit_id] = self._found(unit, state[unit_id], parts)
            if self.config.compile:
                calls = self._pass.compiled_calls - calls
                for module_id, live_steps in aux[unit_id].live_steps.items():
                    count = torch.full_like(live_steps, calls)  # []
                    aux[unit_id].metrics[module_id]["compiled_calls"] = count
        return grads, aux

    def step_in_parts(
        self,
        state: State,
        sample: Sample,
        seam: Seam,
        *,
        minibatches: int | None,
        epochs: int | None,
    ) -> StepOutput[State]:
        """Parts are rows of the sample, in their order: what is estimated along a row stays whole.
        However often a step is learned from, it counts once for schedules."""
        count, epochs = minibatches or 1, epochs or 1
        parts = {key: micro_batches(columns, count) for key, columns in sample.items()}
        before, each = state, []
        for _ in range(epochs):
            # As many at every learner, though its sample has fewer rows.
            for place in range(count):
                part = {key: own[place] for key, own in parts.items() if place < len(own)}
                state, metrics, _ = self.step(state, part, seam)
                each.append(metrics)
        for unit_id, old in before.items():
            steps = old["steps"] + (state[unit_id]["steps"] - old["steps"]) // epochs  # []
            state = {**state, unit_id: UnitState(**{**state[unit_id], "steps": steps})}
        return StepOutput(state, mean_metrics(each))

    def batch_spaces(self) -> dict[str, tuple[Space, Space]]:
        if not self.learns_from_episodes:
            return {}
        return {
            key: (module.observation_space, module.action_space)
            for key, module in self.modules.items()
        }

    def nothing(self, state: State) -> tuple[Grads, Aux]:
        grads: Grads = {}
        aux: Aux = {}
        for unit_id, own in state.items():
            modules = self._units[unit_id].modules
            none = torch.zeros_like(own["steps"])  # []
            zero = own["parameters"].new_zeros(())  # []
            grads[unit_id] = torch.zeros_like(own["parameters"])  # [P]
            aux[unit_id] = UnitAux(
                live_steps=dict.fromkeys(modules, none),
                metrics={},
                buffers=own["buffers"],
                means={key: dict.fromkeys(self.mean_names, zero) for key in modules},
                gradients=dict.fromkeys(modules, grads[unit_id]) if len(modules) > 1 else {},
            )
        return grads, aux

    def _found(self, unit: Unit, state: UnitState, parts: Sample) -> tuple[Tensor, UnitAux]:
        """The gradient [P] of a unit's losses, and all else: module by module, as their losses are
        means over live steps of their own."""
        aux = UnitAux({}, {}, state["buffers"], {})
        gradients = {}
        for module_id, columns in parts.items():
            so_far: UnitState = {**state, "buffers": aux.buffers}
            gradients[module_id], its = self._of_module(unit, so_far, module_id, columns)
            aux = UnitAux(
                {**aux.live_steps, **its.live_steps},
                {**aux.metrics, **its.metrics},
                its.buffers,
                {**aux.means, **its.means},
                gradients if len(unit.modules) > 1 else {},
            )
        return reduce(torch.add, gradients.values()), aux  # [P]

    def _of_module(
        self, unit: Unit, state: UnitState, module_id: str, columns: Columns
    ) -> tuple[Tensor, UnitAux]:
        """The gradient [P] of one module's loss, and all else."""
        if self.config.micro_batches == 1:
            loss = partial(self._loss, unit, state, module_id, columns)
            return self._gradient(loss, state["parameters"])
        mean = MeanOverParts()
        for part in micro_batches(columns, self.config.micro_batches):
            loss = partial(self._loss, unit, state, module_id, part)
            gradient, its = self._gradient(loss, state["parameters"])
            tree = {"gradient": gradient, "metrics": its.metrics, "means": its.means}
            mean.add(tree, its.live_steps[module_id])
            state = {**state, "buffers": its.buffers}
        found = mean.mean()
        live_steps = {module_id: mean.live_steps}
        aux = UnitAux(live_steps, found["metrics"], state["buffers"], found["means"])
        return found["gradient"], aux

    def _must_know(self, module_ids: Iterable[str]) -> None:
        if unknown := set(module_ids) - self.modules.keys():
            known = sorted(self.modules)
            raise ValueError(f"sample for modules {sorted(unknown)}; there are {known}")

    def _loss(
        self,
        unit: Unit,
        state: UnitState,
        module_id: str,
        columns: Columns,
        parameters: Tensor,
    ) -> tuple[Tensor, UnitAux]:
        """The loss [] of one module with its unit's parameters [P], and all else."""
        buffers = {name: buffer.clone() for name, buffer in state["buffers"].items()}
        loss = self.loss(Forward(unit, module_id, parameters, buffers), columns, state)
        return loss.total, UnitAux(
            {module_id: loss.live_steps},
            {module_id: loss.metrics},
            buffers,
            {module_id: loss.means},
        )

    @torch.no_grad()
    def apply(self, state: State, grads: Grads, aux: Aux) -> StepOutput[State]:
        state, metrics = dict(state), {}
        for unit_id, gradient in grads.items():
            old, found = state[unit_id], aux[unit_id]
            optimizers = self._optimizers[unit_id]
            lrs = {key: self.schedules[key](old["steps"]) for key in optimizers.lr_keys}  # []
            norm = torch.linalg.vector_norm(gradient)  # []
            finite = norm.isfinite()  # []
            parameters, moments = optimizers.update(
                old["parameters"], gradient, norm, old["moments"], lrs
            )
            moved = finite & self._units[unit_id].concerned(found.live_steps)  # [] or [P]
            stepped = moved.any()  # []
            live_steps = reduce(torch.maximum, found.live_steps.values())  # []
            new = UnitState(
                parameters=torch.where(moved, parameters, old["parameters"]),
                buffers=_choose(stepped, found.buffers, old["buffers"]),
                moments=_choose(moved, moments, old["moments"]),
                extra=old["extra"],
                steps=old["steps"] + stepped * live_steps,
            )
            if new["extra"]:
                new["extra"] = _choose(stepped, self.next_extra(new, found), old["extra"])
            state[unit_id] = new
            for module_id, values in found.metrics.items():
                metrics[module_id] = {
                    **values,
                    "grad_norm": norm,
                    **lrs,
                    "skipped": (~finite).float(),
                }
        return StepOutput(state, metrics)

    @property
    def member_keys(self) -> list[str]:
        """Of the config: what members of a population may differ in."""
        return [*self.schedules, *self.config.numbers_of_losses()]

    def as_member(self, values: Mapping[str, Tensor]) -> Self:
        """The same core for use within `torch.func.vmap`, with values [] by key in place of those
        of its schedules and of its config."""
        dtype = next(
            parameter.dtype
            for module in self.modules.values()
            for parameter in module.parameters()
            if parameter.requires_grad
        )
        fixed = {key: x for key, x in values.items() if key in self.schedules}
        # As a number would be: it does not make the losses of smaller parameters larger.
        numbers: dict[str, Any] = {
            key: x.to(dtype) for key, x in values.items() if key not in fixed
        }
        member = copy.copy(self)
        member.config = replace(self.config, **numbers)
        member.schedules = {
            **self.schedules,
            **{key: partial(_fixed, x) for key, x in fixed.items()},
        }
        member._gradient = functional_gradient_of
        return member

    def initial_states(self) -> dict[str, Any]:
        return {
            module_id: initial
            for unit in self._units.values()
            for module_id, module in unit.modules.items()
            if (initial := module.get_initial_state())
        }

    def get_params(self, state: State) -> Params:
        return {
            module_id: tensors
            for unit_id, unit in state.items()
            for module_id, tensors in self._units[unit_id]
            .acting(as_sent(unit["parameters"], self.config.weights_dtype), unit["buffers"])
            .items()
        }

    def with_weights(
        self, state: State, weights: Mapping[str, Tree], seed: int, *, whole: bool = False
    ) -> State:
        if unknown := weights.keys() - self.modules.keys():
            name = sorted(unknown)[0]
            raise StateMismatch(f"there is no module {name!r}{nearest(name, self.modules)}")
        new = dict(state)
        for unit_id, unit in self._units.items():
            old = state[unit_id]
            own = {key: weights[key] for key in unit.modules if key in weights}
            if not own and not whole:
                continue
            tensors = with_weights(unit, old["parameters"], old["buffers"], own, whole=whole)
            begun: UnitState = self._beginning(unit, *tensors, seed)
            begun = to_device(begun, old["parameters"].device)
            begun["steps"] = old["steps"]
            new[unit_id] = begun
        return new

    def state_to_tree(self, state: State) -> dict[str, Tree]:
        return arrays_like(by_name(self._units, state))

    def state_from_tree(self, tree: Tree, like: State) -> State:
        return from_names(tensors_like(tree, by_name(self._units, like)))

    def _beginning(
        self, unit: Unit, parameters: Tensor, buffers: dict[str, Tensor], seed: int
    ) -> UnitState:
        """The state of a unit that was never trained, with these parameters [P] and buffers."""
        moments = self._optimizers[unit.id].init(parameters)
        if len(unit.modules) > 1:
            # Every parameter counts its own updates: not all of them are in each of the unit's.
            moments = {
                name: moment.expand_as(parameters).to(parameters.dtype, copy=True)
                for name, moment in moments.items()
            }
        steps = torch.zeros((), dtype=torch.int64)  # []
        return UnitState(
            parameters=parameters,
            buffers=buffers,
            moments=moments,
            extra=self.initial_extra(parameters, seed),
            steps=steps,
        )


def _fixed(value: Tensor, steps: Tensor) -> Tensor:
    """A value [] whatever the steps."""
    return value


def _choose(
    condition: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of one of two maps, by a condition that the host never reads."""
    return {name: torch.where(condition, new[name], tensor) for name, tensor in old.items()}
