"""GradientCore: all of an algorithm but its loss."""

from __future__ import annotations

import operator
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from juggler.learner.config import LearnerConfig
from juggler.learner.core import (
    Aux,
    Columns,
    Grads,
    LearnerCore,
    Params,
    Sample,
    StepOutput,
    UnitAux,
)
from juggler.learner.optimizers import Moments, clip_by_global_norm, make_optimizer
from juggler.learner.schedules import Schedule
from juggler.learner.state import arrays_like, tensors_like
from juggler.learner.unit import Unit
from juggler.runtime.modules.multi_rl_module import MultiRLModule
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.trees import Tree

#: What makes modules with freshly drawn parameters: by module id, or all of them together.
Factories = Mapping[str, Callable[[], RLModule]] | Callable[[], MultiRLModule]


class UnitState(TypedDict):
    """All that training changes about one unit. None of these tensors is changed in place."""

    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]
    moments: Moments  # of the optimizer
    steps: Tensor  # [] int64: live steps trained on, of the module with most; schedules follow it


#: By unit.
State = dict[str, UnitState]


class Loss(NamedTuple):
    """What an algorithm makes of one module's part of a sample."""

    total: Tensor  # [] to be minimized, a mean over live steps
    live_steps: Tensor  # [] int64
    metrics: dict[str, Tensor]  # [] each


class Forward(NamedTuple):
    """The training pass of one module, with the parameters and buffers of a state."""

    unit: Unit
    module_id: str
    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]

    @property
    def module(self) -> RLModule:
        """For its spaces and its distribution; its own parameters are not those in training."""
        return self.unit.modules[self.module_id]

    def initial_state(self) -> dict[str, Any]:
        """As the module's `get_initial_state`."""
        return self.unit.initial_state(self.module_id, self.parameters, self.buffers)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return self.unit.forward_train(self.module_id, self.parameters, self.buffers, batch)


class GradientCore(LearnerCore[State], ABC):
    """A LearnerCore that minimizes a loss for each module with one optimizer.

    Modules that share parameters form one unit: its loss is the sum of theirs, and what they share
    takes one step of the optimizer. Every other module is a unit by its own id.

    An algorithm is a subclass with `loss`. If a gradient is not finite, its unit's state stays as
    it was, and the metric `skipped` is 1. So does what belongs only to modules without a live step
    in the sample, the optimizer's memory of it included.
    """

    name: str
    trains_on: frozenset[str]

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
        modules, groups = self._make(seed=0)
        if config.burn_in and not any(module.get_initial_state() for module in modules.values()):
            raise ValueError(
                f"burn_in = {config.burn_in}: no module has a state that could be warmed up"
            )
        units = [Unit({module_id: modules[module_id] for module_id in ids}) for ids in groups]
        self._units = {unit.id: unit for unit in units}
        self._optimizer = make_optimizer(config)
        self._lr = Schedule.linear(config.lr, config.lr_final, config.schedule_steps)

    @abstractmethod
    def loss(self, forward: Forward, columns: Columns, steps: Tensor) -> Loss:
        """The loss of one module.

        Args:
            forward: the module's training pass.
            columns: the module's part of the sample.
            steps: 0-d int64, live steps trained on before.
        """

    def init(self, seed: int) -> State:
        modules, _ = self._make(seed)
        return {unit_id: self._initial(unit, modules) for unit_id, unit in self._units.items()}

    def grads(self, state: State, sample: Sample) -> tuple[Grads, Aux]:
        known = {module_id for unit in self._units.values() for module_id in unit.modules}
        if unknown := sample.keys() - known:
            raise ValueError(f"sample for modules {sorted(unknown)}; there are {sorted(known)}")
        grads: Grads = {}
        aux: Aux = {}
        for unit_id, unit in self._units.items():
            parts = {
                module_id: sample[module_id] for module_id in unit.modules if module_id in sample
            }
            if not parts:
                continue
            old = state[unit_id]
            parameters = old["parameters"].detach().requires_grad_()  # [P]
            buffers = {name: buffer.clone() for name, buffer in old["buffers"].items()}
            losses = {
                module_id: self.loss(
                    Forward(unit, module_id, parameters, buffers), columns, old["steps"]
                )
                for module_id, columns in parts.items()
            }
            total = reduce(operator.add, (loss.total for loss in losses.values()))  # []
            (grads[unit_id],) = torch.autograd.grad(total, parameters)  # [P]
            aux[unit_id] = UnitAux(
                {module_id: loss.live_steps for module_id, loss in losses.items()},
                {module_id: loss.metrics for module_id, loss in losses.items()},
                buffers,
            )
        return grads, aux

    @torch.no_grad()
    def apply(self, state: State, grads: Grads, aux: Aux) -> StepOutput[State]:
        state, metrics = dict(state), {}
        for unit_id, gradient in grads.items():
            old, found = state[unit_id], aux[unit_id]
            lr = self._lr(old["steps"])  # []
            norm = torch.linalg.vector_norm(gradient)  # []
            finite = norm.isfinite()  # []
            if self.config.grad_clip is not None:
                gradient = clip_by_global_norm(gradient, norm, self.config.grad_clip)  # [P]
            parameters, moments = self._optimizer.update(
                old["parameters"], gradient, old["moments"], lr
            )
            moved = finite & self._units[unit_id].concerned(found.live_steps)  # [] or [P]
            stepped = moved.any()  # []
            live_steps = reduce(torch.maximum, found.live_steps.values())  # []
            state[unit_id] = UnitState(
                parameters=torch.where(moved, parameters, old["parameters"]),
                buffers=_choose(stepped, found.buffers, old["buffers"]),
                moments=_choose(moved, moments, old["moments"]),
                steps=old["steps"] + stepped * live_steps,
            )
            for module_id, values in found.metrics.items():
                metrics[module_id] = {
                    **values,
                    "grad_norm": norm,
                    "lr": lr,
                    "skipped": (~finite).float(),
                }
        return StepOutput(state, metrics)

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
            .acting(unit["parameters"], unit["buffers"])
            .items()
        }

    def state_to_tree(self, state: State) -> dict[str, Tree]:
        return arrays_like(self._named(state))

    def state_from_tree(self, tree: Tree, like: State) -> State:
        named = tensors_like(tree, self._named(like))
        return {
            unit_id: UnitState(
                parameters=_joined(unit["parameters"]),
                buffers=unit["buffers"],
                moments={name: _joined(moment) for name, moment in unit["moments"].items()},
                steps=unit["steps"],
            )
            for unit_id, unit in named.items()
        }

    def _make(self, seed: int) -> tuple[dict[str, RLModule], list[list[str]]]:
        """Modules by id, and which of them are trained as one."""
        if isinstance(self._factories, Mapping):
            modules = {}
            for module_id, make in self._factories.items():
                with _seeded(seed, module_id):
                    modules[module_id] = make()
            return modules, [[module_id] for module_id in modules]
        with _seeded(seed, "multi"):
            multi = self._factories()
        return dict(multi.items()), [list(ids) for ids in multi.shared_groups()]

    def _initial(self, unit: Unit, modules: Mapping[str, RLModule]) -> UnitState:
        parameters, buffers = unit.flatten(modules)
        moments = self._optimizer.init(parameters)
        if len(unit.modules) > 1:
            # Every parameter counts its own updates: not all of them are in each of the unit's.
            moments = {
                name: moment.expand_as(parameters).to(parameters.dtype, copy=True)
                for name, moment in moments.items()
            }
        steps = torch.zeros((), dtype=torch.int64)  # []
        return UnitState(parameters=parameters, buffers=buffers, moments=moments, steps=steps)

    def _named(self, state: State) -> dict[str, Any]:
        """The state with every flat vector taken apart into parameters."""
        named: dict[str, Any] = {}
        for unit_id, unit in state.items():
            by_name = self._units[unit_id].named
            named[unit_id] = {
                "parameters": by_name(unit["parameters"]),
                "buffers": unit["buffers"],
                "moments": {
                    name: by_name(moment) if moment.ndim else moment
                    for name, moment in unit["moments"].items()
                },
                "steps": unit["steps"],
            }
        return named


def _joined(moment: Tensor | dict[str, Tensor]) -> Tensor:
    if isinstance(moment, Tensor):
        return moment
    return torch.cat([piece.reshape(-1) for piece in moment.values()])  # [P]


def _choose(
    condition: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of one of two maps, by a condition that the host never reads."""
    return {name: torch.where(condition, new[name], tensor) for name, tensor in old.items()}


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    """Torch's CPU random numbers from a seed of this name's own, and afterwards as before."""
    entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))
    try:
        yield
    finally:
        torch.set_rng_state(before)
