"""GradientCore: all of an algorithm but its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from juggler.learner.config import LearnerConfig
from juggler.learner.core.forward import Forward as Forward
from juggler.learner.core.forward import Loss as Loss
from juggler.learner.core.forward import checked_loss
from juggler.learner.core.learner_core import (
    Aux,
    Columns,
    GradientAux,
    Grads,
    LearnerCore,
    Params,
    Sample,
    Seam,
    Space,
    StepOutput,
)
from juggler.learner.core.metrics import mean_metrics
from juggler.learner.core.micro_batches import MeanOverParts, micro_batches
from juggler.learner.core.starting_weights import with_weights
from juggler.learner.core.state import StateMismatch, arrays_like, as_sent, tensors_like, to_device
from juggler.learner.optim.group_optimizers import ParameterGroupOptimizers, check_patterns
from juggler.learner.optim.optimizers import Optimizer, Schedule
from juggler.learner.optim.parameter_group import Factories as Factories
from juggler.learner.optim.parameter_group import ParameterGroup, make_modules
from juggler.learner.optim.parameter_group_state import ParameterGroupState as ParameterGroupState
from juggler.learner.optim.parameter_group_state import State as State
from juggler.learner.optim.parameter_group_state import by_name, from_names, with_steps
from juggler.learner.optim.training_pass import TrainingPass
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.trees import Tree


class GradientCore(LearnerCore[State], ABC):
    """A LearnerCore that minimizes a loss for each module.

    Modules that share parameters form one parameter group. Its loss is the sum of their losses, and
    its optimizer makes one step of all their parameters. Every other module is a group by itself.

    An algorithm is a subclass with a `name` and a `loss`. The loss finds its hyper-parameters in
    `config`, and those that change with the steps trained on in `schedules`.

    If a gradient is not finite, the state of its group stays as it was, and the metric `skipped` is
    1. Parameters that belong only to modules without a live step in the sample stay as they were
    too, and so do the optimizer's moments of them.
    """

    name: str

    trains_on: frozenset[str] = frozenset({"episodes", "batch"})

    learns_from_episodes: bool = False
    """Whether a batch of columns must have all the columns of a batch of episodes."""

    mean_names: tuple[str, ...] = ()
    """Names of the `means` of its Loss; see there."""

    schedules: dict[str, Callable[[Tensor], Tensor]]
    """By key of the config: steps trained on -> the present value, both 0-d."""

    mapped: bool = False
    """Whether this core runs within `torch.func.vmap`, as a member of a population."""

    def __init__(self, factories: Factories, config: LearnerConfig) -> None:
        """Args:
            factories: by module id, functions that make a module with newly drawn parameters; or
                one function that makes a MultiRLModule.
            config: hyper-parameters, the same for all modules.

        Raises:
            ValueError: a hyper-parameter is out of range, or a module cannot be trained.
        """
        if not hasattr(self, "name"):
            raise ValueError(f"{type(self).__name__} needs a name, which its checkpoints carry")
        config.validate()
        self.config = config
        self._factories = factories
        modules, shared = make_modules(factories, seed=0)
        self._pass = TrainingPass(bfloat16=config.precision == "bfloat16", compiled=config.compile)
        groups = [
            ParameterGroup({module_id: modules[module_id] for module_id in ids}, self._pass)
            for ids in shared
        ]
        self._groups = {group.id: group for group in groups}
        specs = config.optimizer_specs()
        check_patterns(groups, specs)
        self._optimizers = {group.id: ParameterGroupOptimizers(group, specs) for group in groups}
        self._counts_each = False
        self.schedules = {spec.lr_key: Schedule(spec.config.lr) for spec in reversed(specs)}

    @property
    def groups(self) -> Mapping[str, ParameterGroup]:
        """The parameter groups, by id."""
        return self._groups

    def optimizer_of(self, group_id: str, name: str) -> Optimizer:
        """The optimizer of a parameter, by its name in the group."""
        return self._optimizers[group_id].optimizer_of(name)

    def shares_parts(self, state: State) -> State:
        """The state of modules that share parts with those of other cores.

        From here on, the optimizer counts the updates of each parameter.
        """
        self._counts_each = True
        return {group_id: _counting_each(own) for group_id, own in state.items()}

    @property
    def modules(self) -> dict[str, RLModule]:
        """By id, for their spaces and distributions. Their own parameters are not trained."""
        return {key: each for group in self._groups.values() for key, each in group.modules.items()}

    @abstractmethod
    def loss(self, forward: Forward, columns: Columns, state: ParameterGroupState) -> Loss:
        """The loss of one module.

        Args:
            forward: the module's training pass, with the parameters to differentiate.
            columns: the module's part of the sample.
            state: its parameter group's state before this update; its tensors need no gradient.

        Returns:
            A `Loss`. `grads` raises a ValueError about anything else.
        """

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        """The initial `extra`: what the algorithm keeps beside a group's parameters [P]."""
        return {}

    def next_extra(self, new: ParameterGroupState, aux: GradientAux) -> dict[str, Tensor]:
        """The next `extra`, given the state after an optimizer step (whose `extra` is still the old
        one)."""
        return new["extra"]

    def init(self, seed: int) -> State:
        modules, _ = make_modules(self._factories, seed)
        return {
            group_id: self._beginning(group, *group.flatten(modules), seed)
            for group_id, group in self._groups.items()
        }

    def forward(self, state: State, module_id: str) -> Forward:
        """The training pass of a module, with a state's parameters and copies of its buffers.

        Raises:
            ValueError: there is no such module.
        """
        self._must_know([module_id])
        group = next(group for group in self._groups.values() if module_id in group.modules)
        own = state[group.id]
        buffers = {name: buffer.clone() for name, buffer in own["buffers"].items()}
        return Forward(group, module_id, own["parameters"], buffers)

    def grads(self, state: State, sample: Sample) -> tuple[Grads, Aux]:
        """Gradients module by module: each loss is a mean over the module's own live steps."""
        self._must_know(sample)
        grads: Grads = {}
        aux: Aux = {}
        for group_id, group in self._groups.items():
            own = state[group_id]
            gradients: dict[str, Tensor] = {}  # [P] by module id
            found = GradientAux({}, {}, {}, {}, priorities={})
            for module_id in group.modules:
                if module_id not in sample:
                    continue
                calls = self._pass.compiled_calls
                mean, priorities = MeanOverParts(), []
                for part in micro_batches(sample[module_id], self.config.micro_batches):
                    buffers = {name: buffer.clone() for name, buffer in own["buffers"].items()}
                    parameters = own["parameters"].detach()  # [P]
                    forward = Forward(group, module_id, parameters, buffers)
                    if self.mapped:
                        gradient, loss, buffers = _by_vmap(self, forward, part, own)
                    else:
                        parameters.requires_grad_()
                        loss = self._checked(self.loss(forward, part, own))
                        (gradient,) = torch.autograd.grad(loss.total, parameters)  # [P]
                    mean.add((gradient, loss.metrics, loss.means), loss.live_steps)
                    if loss.priorities is not None:
                        priorities.append(loss.priorities)
                    own = ParameterGroupState(**{**own, "buffers": buffers})
                gradients[module_id], found.metrics[module_id], found.means[module_id] = mean.mean()
                found.live_steps[module_id] = mean.live_steps
                if priorities:
                    found.priorities[module_id] = torch.cat(priorities)  # [N]
                if self.config.compile:
                    calls = self._pass.compiled_calls - calls
                    found.metrics[module_id]["compiled_calls"] = torch.full_like(
                        mean.live_steps, calls
                    )  # []
            if gradients:
                parts = gradients if len(group.modules) > 1 else {}
                grads[group_id] = reduce(torch.add, gradients.values())  # [P]
                aux[group_id] = found._replace(buffers=own["buffers"], gradients=parts)
        return grads, aux

    @torch.no_grad()
    def apply(self, state: State, grads: Grads, aux: Aux) -> StepOutput[State]:
        state, metrics, priorities = dict(state), {}, {}
        for group_id, gradient in grads.items():
            old, found = state[group_id], aux[group_id]
            optimizers = self._optimizers[group_id]
            lrs = {key: self.schedules[key](old["steps"]) for key in optimizers.lr_keys}  # []
            norm = torch.linalg.vector_norm(gradient)  # []
            finite = norm.isfinite()  # []
            parameters, moments = optimizers.update(
                old["parameters"], gradient, norm, old["moments"], lrs
            )
            moved = finite & self._groups[group_id].concerned(found.live_steps)  # [] or [P]
            stepped = moved.any()  # []
            live_steps = reduce(torch.maximum, found.live_steps.values())  # []
            new = ParameterGroupState(
                parameters=torch.where(moved, parameters, old["parameters"]),
                buffers=_choose(stepped, found.buffers, old["buffers"]),
                moments=_choose(moved, moments, old["moments"]),
                extra=old["extra"],
                steps=old["steps"] + stepped * live_steps,
            )
            if new["extra"]:
                new["extra"] = _choose(stepped, self.next_extra(new, found), old["extra"])
            state[group_id] = new
            for module_id, values in found.metrics.items():
                metrics[module_id] = {
                    **values,
                    "grad_norm": norm,
                    **lrs,
                    "skipped": (~finite).float(),
                }
            priorities.update(found.priorities)
        return StepOutput(state, metrics, priorities or None)

    def passes(self) -> tuple[int, int]:
        """Minibatches and epochs of `step_in_parts` where a call says nothing about them."""
        return 1, 1

    def step_in_parts(
        self, state: State, sample: Sample, seam: Seam, minibatches: int | None, epochs: int | None
    ) -> StepOutput[State]:
        """Parts are rows of the sample, in their order: what is estimated along a row stays whole.
        However often a step is learned from, it counts once for schedules."""
        count, passes = self.passes()
        count, epochs = minibatches or count, epochs or passes
        parts = {key: micro_batches(columns, count) for key, columns in sample.items()}
        before, each = state, []
        for _ in range(epochs):
            # Every learner makes the same number of steps, even if its sample has fewer rows.
            for place in range(count):
                part = {key: own[place] for key, own in parts.items() if place < len(own)}
                state, metrics, _ = super().step(state, part, seam)
                each.append(metrics)
        steps = {
            key: old["steps"] + (state[key]["steps"] - old["steps"]) // epochs
            for key, old in before.items()
        }  # [] each
        return StepOutput(with_steps(state, steps), mean_metrics(each))

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
        for group_id, own in state.items():
            modules = self._groups[group_id].modules
            none = torch.zeros_like(own["steps"])  # []
            zero = own["parameters"].new_zeros(())  # []
            grads[group_id] = torch.zeros_like(own["parameters"])  # [P]
            aux[group_id] = GradientAux(
                live_steps=dict.fromkeys(modules, none),
                metrics={},
                buffers=own["buffers"],
                means={key: dict.fromkeys(self.mean_names, zero) for key in modules},
                gradients=dict.fromkeys(modules, grads[group_id]) if len(modules) > 1 else {},
            )
        return grads, aux

    def critic_spaces(self) -> dict[str, Space]:
        spaces = {key: module.critic_space for key, module in self.modules.items()}
        return {key: space for key, space in spaces.items() if space is not None}

    def initial_states(self) -> dict[str, Any]:
        states = {key: module.get_initial_state() for key, module in self.modules.items()}
        return {key: state for key, state in states.items() if state}

    def get_params(self, state: State) -> Params:
        return {
            module_id: tensors
            for group_id, own in state.items()
            for module_id, tensors in self._groups[group_id]
            .acting(as_sent(own["parameters"], self.config.weights_dtype), own["buffers"])
            .items()
        }

    def with_weights(
        self, state: State, weights: Mapping[str, Tree], seed: int, *, whole: bool = False
    ) -> State:
        if unknown := weights.keys() - self.modules.keys():
            name = sorted(unknown)[0]
            raise StateMismatch(f"there is no module {name!r}{nearest(name, self.modules)}")
        new = dict(state)
        for group_id, group in self._groups.items():
            old = state[group_id]
            own = {key: weights[key] for key in group.modules if key in weights}
            if not own and not whole:
                continue
            tensors = with_weights(group, old["parameters"], old["buffers"], own, whole=whole)
            begun: ParameterGroupState = self._beginning(group, *tensors, seed)
            begun = to_device(begun, old["parameters"].device)
            begun["steps"] = old["steps"]
            new[group_id] = begun
        return new

    def state_to_tree(self, state: State) -> dict[str, Tree]:
        return arrays_like(by_name(self._groups, state))

    def state_from_tree(self, tree: Tree, like: State) -> State:
        return from_names(tensors_like(tree, by_name(self._groups, like)))

    def _checked(self, loss: object) -> Loss:
        where = f"{type(self).__name__}.loss"
        return checked_loss(where, loss, self.mean_names, mapped=self.mapped)

    def _must_know(self, module_ids: Iterable[str]) -> None:
        if unknown := set(module_ids) - self.modules.keys():
            known = sorted(self.modules)
            raise ValueError(f"sample for modules {sorted(unknown)}; there are {known}")

    def _beginning(
        self, group: ParameterGroup, parameters: Tensor, buffers: dict[str, Tensor], seed: int
    ) -> ParameterGroupState:
        """The state of an untrained group with these parameters [P] and buffers."""
        begun = ParameterGroupState(
            parameters=parameters,
            buffers=buffers,
            moments=self._optimizers[group.id].init(parameters),
            extra=self.initial_extra(parameters, seed),
            steps=torch.zeros((), dtype=torch.int64),  # []
        )
        return _counting_each(begun) if len(group.modules) > 1 or self._counts_each else begun


def _counting_each(state: ParameterGroupState) -> ParameterGroupState:
    """The state with counts of each parameter's updates, because an update may change only some."""
    parameters = state["parameters"]
    moments = {
        name: moment.expand_as(parameters).to(parameters.dtype, copy=True)
        for name, moment in state["moments"].items()
    }
    return ParameterGroupState(**{**state, "moments": moments})


def _by_vmap(
    core: GradientCore, forward: Forward, columns: Columns, state: ParameterGroupState
) -> tuple[Tensor, Loss, dict[str, Tensor]]:
    """The gradient [P], the loss and the buffers after it, by `torch.func.grad`: slower than
    torch.autograd, but `torch.func.vmap` can map it."""

    def loss_of(parameters: Tensor) -> tuple[Tensor, tuple[dict[str, Any], dict[str, Tensor]]]:
        buffers = {name: buffer.clone() for name, buffer in forward.buffers.items()}
        here = forward._replace(parameters=parameters, buffers=buffers)
        loss = core._checked(core.loss(here, columns, state))
        # torch.func takes no None for a tensor.
        given = {key: each for key, each in loss._asdict().items() if each is not None}
        return loss.total, (given, buffers)

    gradient, (given, buffers) = torch.func.grad(loss_of, has_aux=True)(forward.parameters)
    return gradient, Loss(**given), buffers


def _choose(
    condition: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of `new` if the condition holds, else those of `old`. The host reads nothing."""
    return {name: torch.where(condition, new[name], tensor) for name, tensor in old.items()}
