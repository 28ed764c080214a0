"""GradientCore: all of an algorithm but its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from functools import partial, reduce
from typing import Any

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
    Aux,
    Columns,
    GradientAux,
    Grads,
    Sample,
    Seam,
    StepOutput,
)
from juggler.learner.core.metrics import mean_metrics
from juggler.learner.core.micro_batches import MeanOverParts, micro_batches
from juggler.learner.core.state_core import StateCore
from juggler.learner.core.varying_columns import with_recurring_shapes
from juggler.learner.data.sources import NEW_STEPS
from juggler.learner.optim.optimizers import chosen, on_host
from juggler.learner.optim.parameter_group import Factories as Factories
from juggler.learner.optim.parameter_group import ParameterGroup as ParameterGroup
from juggler.learner.optim.parameter_group_state import ParameterGroupState as ParameterGroupState
from juggler.learner.optim.parameter_group_state import State as State
from juggler.learner.optim.parameter_group_state import copied, with_steps
from juggler.runtime.recorder import Recordings

#: Keys that say how often a loss is computed in an update, if an algorithm has them.
_PASSES = ("minibatches", "epochs")


class GradientCore(StateCore, ABC):
    """A StateCore that minimizes a loss for each module.

    The loss of a parameter group is the sum of its modules' losses, and its optimizer makes one
    step of all their parameters.

    An algorithm is a subclass with a `name` and a `loss`. The loss finds its hyper-parameters in
    `config`, and those that change with the steps trained on in `schedules`.

    If a gradient is not finite, the state of its group stays as it was, and the metric `skipped` is
    1. Parameters that belong only to modules without a live step in the sample stay as they were
    too, and so do the optimizer's moments of them.
    """

    trains_on: frozenset[str] = frozenset({"episodes", "batch"})

    mean_names: tuple[str, ...] = ()
    """Names of the `means` of its Loss; see there."""

    learns_from_rewards: bool = True
    """Whether rewards make a difference."""

    mapped: bool = False
    """Whether this core runs within `torch.func.vmap`, as a member of a population."""

    def __init__(self, factories: Factories, config: LearnerConfig) -> None:
        super().__init__(factories, config)
        self._recordings = None if config.compile or _has_others_code(self) else Recordings()

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

    def exploration(self, state: ParameterGroupState) -> dict[str, Tensor]:
        """How much EnvRunners explore from this optimizer step on, whatever the loss is.

        Args:
            state: of a parameter group, before the step.

        Returns:
            Values [] by the names of buffers that all of its modules have, such as "epsilon". The
            metrics have them too. {}: the algorithm sets no such buffer.
        """
        return {}

    def decided(self, state: ParameterGroupState) -> bool | None:
        """What the loss of a core that ships decides by a number of the state, where the host can
        read it; none: nothing."""
        return None

    def next_extra(self, new: ParameterGroupState, aux: GradientAux) -> dict[str, Tensor]:
        """The next `extra`, given the state after an optimizer step (whose `extra` is still the old
        one)."""
        return new["extra"]

    def extra_after(
        self, new: ParameterGroupState, aux: GradientAux, stepped: Tensor
    ) -> dict[str, Tensor]:
        """`next_extra` if the optimizer made a step (`stepped`, a bool []), else the old extra."""
        return chosen(stepped, self.next_extra(new, aux), new["extra"])

    def moving(
        self, group: ParameterGroup, state: ParameterGroupState, live_steps: Mapping[str, Tensor]
    ) -> Tensor:
        """Which parameters an optimizer step changes -> bool [K], in the order of the group's
        `sizes`, or [] for all. The others keep their moments too. A core that says so by itself
        sets `counts_each`.

        Args:
            group: the parameter group.
            state: its state before the step.
            live_steps: 0-d, by id of the modules that have a part in the sample.
        """
        return group.concerned(live_steps)

    def grads(self, state: State, sample: Sample) -> tuple[Grads, Aux]:
        """Gradients module by module: each loss is a mean over the module's own live steps."""
        self._must_know(sample)
        grads: Grads = {}
        aux: Aux = {}
        for group_id, group in self._groups.items():
            own = state[group_id]
            gradients: dict[str, Tensor] = {}  # [P] by module id
            found = GradientAux({}, {}, {}, {}, priorities={}, new_steps={})
            for module_id in group.modules:
                if module_id not in sample:
                    continue
                calls = self._pass.compiled_calls
                mean, priorities = MeanOverParts(), []
                for part in micro_batches(sample[module_id], self.config.micro_batches):
                    if self.mapped:
                        forward = Forward(group, module_id, own["parameters"], own["buffers"])
                        loss_of = partial(self._loss_for_vmap, columns=part, state=own)
                        gradient, loss, buffers = gradient_for_vmap(loss_of, forward)  # [P]
                    else:
                        gradient, loss, buffers = self._gradient(group, module_id, part, own)  # [P]
                    mean.add((gradient, loss.metrics, loss.means), loss.live_steps)
                    if loss.priorities is not None:
                        priorities.append(loss.priorities)
                    own = ParameterGroupState(**{**own, "buffers": buffers})
                gradients[module_id], found.metrics[module_id], found.means[module_id] = mean.mean()
                found.live_steps[module_id] = mean.live_steps
                if NEW_STEPS in sample[module_id]:
                    found.new_steps[module_id] = sample[module_id][NEW_STEPS]  # []
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
            found = aux[group_id]
            stepped = self._stepped(group_id, state[group_id], gradient, found)
            state[group_id] = stepped["state"]
            for module_id, values in found.metrics.items():
                metrics[module_id] = {**values, **stepped["metrics"]}
            priorities.update(found.priorities)
        return StepOutput(state, metrics, priorities or None)

    def reads(self, x: Tensor) -> bool:
        """Whether the host can read numbers of a tensor at once, without waiting for a device."""
        return on_host(x) and not self.mapped

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
        state = copied(state)  # if the seam fails midway, the old one stays as it was
        for _ in range(epochs):
            priorities = defaultdict[str, list[Tensor]](list)  # of the last epoch
            # Every learner makes the same number of steps, even if its sample has fewer rows.
            for place in range(count):
                part = {key: own[place] for key, own in parts.items() if place < len(own)}
                state, metrics, found = super().step(state, part, seam)
                each.append(metrics)
                for key, own in (found or {}).items():
                    priorities[key].append(own)  # [n]
        steps = {
            key: old["steps"] + (state[key]["steps"] - old["steps"]) // epochs
            for key, old in before.items()
        }  # [] each
        together = {key: torch.cat(own) for key, own in priorities.items()}  # [N] each
        return StepOutput(with_steps(state, steps), mean_metrics(each), together or None)

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

    def _stepped(
        self, group_id: str, state: ParameterGroupState, gradient: Tensor, aux: GradientAux
    ) -> dict[str, Any]:
        """The state and metrics of a group after an optimizer step with a gradient [P]."""
        inputs = {"state": {group_id: state}, "gradient": gradient, "aux": aux._asdict()}
        compute = partial(self._optimized, group_id)
        if self._recordings is None or self.mapped or on_host(gradient):
            return compute(inputs)
        found: dict[str, Any] = self._recordings(
            compute, inputs, self._basis(), before={"state": state}
        )
        return found

    def _optimized(self, group_id: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What `_stepped` returns, as a tree of tensors."""
        old, gradient = inputs["state"][group_id], inputs["gradient"]  # gradient: [P]
        found, optimizers = GradientAux(**inputs["aux"]), self._optimizers[group_id]
        lrs = {key: self.schedules[key](old["steps"]) for key in optimizers.lr_keys}  # []
        norm = torch.linalg.vector_norm(gradient)  # []
        finite = norm.isfinite()  # []
        moved = finite & self.moving(self._groups[group_id], old, found.live_steps)  # [] or [K]
        counts = old["moments"].get("updates", moved)  # [], or [P]
        if moved.ndim and not counts.ndim:
            raise ValueError(
                f"{type(self).__name__}.moving tells parameters apart, whose updates are counted "
                "together: set counts_each = True in that class"
            )
        parameters, moments = optimizers.update(
            old["parameters"], gradient, norm, old["moments"], lrs, moved, self.reads(gradient)
        )
        stepped = moved.any()  # []
        counted = {**found.live_steps, **found.new_steps}.values()  # [] each
        new = ParameterGroupState(
            parameters=parameters,
            buffers=chosen(stepped, found.buffers, old["buffers"]),
            moments=moments,
            extra=old["extra"],
            steps=old["steps"] + stepped * reduce(torch.maximum, counted),
        )
        if new["extra"]:
            new["extra"] = self.extra_after(new, found, stepped)
        return {
            "state": new,
            "metrics": {"grad_norm": norm, **lrs, "skipped": (~finite).float()},
        }

    def _basis(self) -> object:
        """What operations depend on beside tensors. How often they are made is none of it."""
        config = {key: value for key, value in vars(self.config).items() if key not in _PASSES}
        return config, dict(self.schedules)

    def _gradient(
        self,
        group: ParameterGroup,
        module_id: str,
        columns: Columns,
        state: ParameterGroupState,
    ) -> tuple[Tensor, Loss, dict[str, Tensor]]:
        """The gradient [P] of a module's loss, the loss, and the buffers after it."""
        compute = partial(self._computed, group, module_id)
        inputs = {"state": state, "columns": {module_id: columns}}
        if self._recordings is None:
            found = compute(inputs)
        else:
            if not group.modules[module_id].get_initial_state():
                inputs["columns"] = {module_id: with_recurring_shapes(columns)}
            found = self._recordings(compute, inputs, self._basis(), self.decided(state))
        return found["gradient"], Loss(**found["loss"]), found["buffers"]

    def _computed(
        self, group: ParameterGroup, module_id: str, inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What `_gradient` returns, as a tree of tensors."""
        own = inputs["state"]
        forward = Forward(group, module_id, own["parameters"], own["buffers"]).differentiable()
        explores = self._set_exploration(forward, own)
        columns = NamedColumns(inputs["columns"][module_id])
        loss = self._checked(self.loss(forward, columns, own), columns, explores)
        gradient = gradient_of(loss.total, forward)  # [P]
        given = {name: each for name, each in loss._asdict().items() if each is not None}
        loss_of = {**given, "total": loss.total.detach()}
        return {"gradient": gradient, "loss": loss_of, "buffers": forward.buffers}

    def _loss_for_vmap(
        self, forward: Forward, columns: Columns, state: ParameterGroupState
    ) -> Loss:
        explores = self._set_exploration(forward, state)
        return self._checked(self.loss(forward, NamedColumns(columns), state), columns, explores)

    def _set_exploration(
        self, forward: Forward, state: ParameterGroupState
    ) -> Mapping[str, Tensor]:
        """What `exploration` says, which the buffers have from now on."""
        explores = self.exploration(state)  # [] each
        for name, value in explores.items():
            forward.set_buffer(name, value)
        return explores

    def _checked(self, loss: object, columns: Columns, explores: Mapping[str, Tensor]) -> Loss:
        """The loss, if it is one, with what says how much is explored among its metrics."""
        where = f"{type(self).__name__}.loss"
        checked = checked_loss(where, loss, columns, self.mean_names, mapped=self.mapped)
        return checked._replace(metrics={**explores, **checked.metrics})


def _has_others_code(core: GradientCore) -> bool:
    """Whether a user's own class has a part in its losses. Who knows what that reads beside tensors
    and the config?"""
    modules = core.modules.values()
    layers = [layer for module in modules for layer in module.modules()]
    return any(map(_is_others, [core, core.config, *layers])) or any(
        _is_others(module.action_distribution()) for module in modules
    )


def _is_others(x: object) -> bool:
    return type(x).__module__.partition(".")[0] not in ("juggler", "torch")
