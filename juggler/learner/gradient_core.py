"""GradientCore: all of an algorithm but its loss."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from juggler.learner.config import LearnerConfig
from juggler.learner.core import Aux, Grads, LearnerCore, ModuleAux, Params, Sample, StepOutput
from juggler.learner.flat_module import FlatModule
from juggler.learner.optimizers import Moments, clip_by_global_norm, make_optimizer
from juggler.learner.schedules import Schedule
from juggler.learner.state import arrays_like, tensors_like
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.trees import Tree


class ModuleState(TypedDict):
    """All that training changes about one module. None of these tensors is changed in place."""

    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]
    moments: Moments  # of the optimizer
    steps: Tensor  # [] int64: live steps trained on; schedules follow it


State = dict[str, ModuleState]


class Loss(NamedTuple):
    """What an algorithm makes of one module's part of a sample."""

    total: Tensor  # [] to be minimized, a mean over live steps
    live_steps: Tensor  # [] int64
    metrics: dict[str, Tensor]  # [] each


class Forward(NamedTuple):
    """The training pass of one module, with the parameters and buffers of a state."""

    flat_module: FlatModule
    parameters: Tensor  # [P]
    buffers: dict[str, Tensor]

    @property
    def module(self) -> RLModule:
        """For its spaces and its distribution; its own parameters are not those in training."""
        return self.flat_module.module

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        return self.flat_module(self.parameters, self.buffers, batch)


class GradientCore(LearnerCore[State], ABC):
    """A LearnerCore that minimizes a loss for each module with one optimizer.

    An algorithm is a subclass with `loss`. If a gradient is not finite, its module's state stays
    as it was, and the metric `skipped` is 1.
    """

    name: str
    trains_on: frozenset[str]

    def __init__(
        self, factories: Mapping[str, Callable[[], RLModule]], config: LearnerConfig
    ) -> None:
        """Args:
            factories: by module id, what makes that module with freshly drawn parameters.
            config: hyper-parameters, the same for all modules.

        Raises:
            ValueError: a hyper-parameter is out of its range, or a module cannot be trained.
        """
        config.validate()
        self.config = config
        self._factories = dict(factories)
        self._flat_modules = {name: FlatModule(make()) for name, make in factories.items()}
        self._optimizer = make_optimizer(config)
        self._lr = Schedule.linear(config.lr, config.lr_final, config.schedule_steps)

    @abstractmethod
    def loss(self, forward: Forward, columns: Mapping[str, Tensor], steps: Tensor) -> Loss:
        """The loss of one module.

        Args:
            forward: the module's training pass.
            columns: the module's part of the sample.
            steps: 0-d int64, live steps trained on before.
        """

    def init(self, seed: int) -> State:
        state: State = {}
        for module_id, make in self._factories.items():
            with _seeded(seed, module_id):
                module = make()
            parameters, buffers = self._flat_modules[module_id].flatten(module)
            state[module_id] = ModuleState(
                parameters=parameters,
                buffers=buffers,
                moments=self._optimizer.init(parameters),
                steps=torch.zeros((), dtype=torch.int64),
            )
        return state

    def grads(self, state: State, sample: Sample) -> tuple[Grads, Aux]:
        if unknown := sample.keys() - state.keys():
            raise ValueError(f"sample for modules {sorted(unknown)}; there are {sorted(state)}")
        grads: Grads = {}
        aux: Aux = {}
        for module_id, columns in sample.items():
            module = state[module_id]
            parameters = module["parameters"].detach().requires_grad_()  # [P]
            buffers = {name: buffer.clone() for name, buffer in module["buffers"].items()}
            forward = Forward(self._flat_modules[module_id], parameters, buffers)
            loss = self.loss(forward, columns, module["steps"])
            (grads[module_id],) = torch.autograd.grad(loss.total, parameters)  # [P]
            aux[module_id] = ModuleAux(loss.live_steps, loss.metrics, buffers)
        return grads, aux

    @torch.no_grad()
    def apply(self, state: State, grads: Grads, aux: Aux) -> StepOutput[State]:
        state, metrics = dict(state), {}
        for module_id, gradient in grads.items():
            old, found = state[module_id], aux[module_id]
            lr = self._lr(old["steps"])  # []
            norm = torch.linalg.vector_norm(gradient)  # []
            if self.config.grad_clip is not None:
                gradient = clip_by_global_norm(gradient, norm, self.config.grad_clip)  # [P]
            parameters, moments = self._optimizer.update(
                old["parameters"], gradient, old["moments"], lr
            )
            new = ModuleState(
                parameters=parameters,
                buffers=found.buffers,
                moments=moments,
                steps=old["steps"] + found.live_steps,
            )
            finite = norm.isfinite()  # []
            state[module_id] = _choose(finite & (found.live_steps > 0), new, old)
            metrics[module_id] = {
                **found.metrics,
                "grad_norm": norm,
                "lr": lr,
                "skipped": (~finite).float(),
            }
        return StepOutput(state, metrics)

    def get_params(self, state: State) -> Params:
        return {
            module_id: {
                **self._flat_modules[module_id].named(module["parameters"]),
                **module["buffers"],
            }
            for module_id, module in state.items()
        }

    def state_to_tree(self, state: State) -> dict[str, Tree]:
        return arrays_like(self._named(state))

    def state_from_tree(self, tree: Tree, like: State) -> State:
        named = tensors_like(tree, self._named(like))
        return {
            module_id: ModuleState(
                parameters=_joined(module["parameters"]),
                buffers=module["buffers"],
                moments={name: _joined(moment) for name, moment in module["moments"].items()},
                steps=module["steps"],
            )
            for module_id, module in named.items()
        }

    def _named(self, state: State) -> dict[str, Any]:
        """The state with every flat vector taken apart into parameters."""
        named: dict[str, Any] = {}
        for module_id, module in state.items():
            flat_module = self._flat_modules[module_id]
            named[module_id] = {
                "parameters": flat_module.named(module["parameters"]),
                "buffers": module["buffers"],
                "moments": {
                    name: flat_module.named(moment) if moment.ndim else moment
                    for name, moment in module["moments"].items()
                },
                "steps": module["steps"],
            }
        return named


def _joined(moment: Tensor | dict[str, Tensor]) -> Tensor:
    if isinstance(moment, Tensor):
        return moment
    return torch.cat([piece.reshape(-1) for piece in moment.values()])  # [P]


def _choose(condition: Tensor, new: Any, old: Any) -> Any:
    """One of two trees of the same form, by a 0-d condition that the host never reads."""
    if isinstance(new, Tensor):
        return torch.where(condition, new, old)
    return {key: _choose(condition, new[key], old[key]) for key in new}


@contextmanager
def _seeded(seed: int, module_id: str) -> Iterator[None]:
    """Torch's CPU random numbers from a seed of this module's own, and afterwards as before."""
    entropy = np.random.SeedSequence([seed, zlib.crc32(module_id.encode())])
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))
    try:
        yield
    finally:
        torch.set_rng_state(before)
