"""StateCore: what an algorithm keeps of its modules, from update to update."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from juggler.learner.config import LearnerConfig
from juggler.learner.core.forward import Forward
from juggler.learner.core.learner_core import LearnerCore, Params, Space
from juggler.learner.core.starting_weights import with_weights
from juggler.learner.core.state import StateMismatch, arrays_like, as_sent, tensors_like, to_device
from juggler.learner.optim.group_optimizers import ParameterGroupOptimizers, check_patterns
from juggler.learner.optim.optimizers import Optimizer
from juggler.learner.optim.parameter_group import Factories, ParameterGroup, make_modules
from juggler.learner.optim.parameter_group_state import (
    ParameterGroupState,
    State,
    by_name,
    counting_each,
    from_names,
)
from juggler.learner.optim.schedules import Schedule
from juggler.learner.optim.training_pass import TrainingPass
from juggler.runtime.checkpoints.weights import ACTING, without_acting
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.trees import Tree


class StateCore(LearnerCore[State], ABC):
    """A LearnerCore with a state for each parameter group: how it begins, is sent to those who act,
    and is saved.

    Modules that share parameters form one parameter group, and every other module is a group by
    itself.
    """

    name: str

    learns_from_episodes: bool = False
    """Whether a batch of columns must have all the columns of a batch of episodes."""

    schedules: dict[str, Callable[[Tensor], Tensor]]
    """By key of the config: steps trained on -> the present value, both 0-d."""

    counts_each: bool = False
    """Whether the optimizer counts the updates of each parameter, because some change only some."""

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
        for table, around in (("intrinsic", "Rnd"), ("imitation", "Discriminator")):
            if getattr(config, table):
                raise ValueError(
                    f"{table} = {getattr(config, table)!r} with {self.name}: a core has no rewards "
                    f"of its own. Put juggler.{around}(core, ...) around it"
                )
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
        self.counts_each = True
        return {group_id: counting_each(own) for group_id, own in state.items()}

    @property
    def modules(self) -> dict[str, RLModule]:
        """By id, for their spaces and distributions. Their own parameters are not trained."""
        return {key: each for group in self._groups.values() for key, each in group.modules.items()}

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        """The initial `extra`: what the algorithm keeps beside a group's parameters [P]."""
        return {}

    def acting_parameters(self, state: ParameterGroupState) -> Tensor:
        """The parameters [P] that EnvRunners and policies act with: those that are trained."""
        return state["parameters"]

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

    def batch_spaces(self) -> dict[str, tuple[Space, Space]]:
        if not self.learns_from_episodes:
            return {}
        return {
            key: (module.observation_space, module.action_space)
            for key, module in self.modules.items()
        }

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
            .acting(as_sent(self.acting_parameters(own), self.config.weights_dtype), own["buffers"])
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
        named = by_name(self._groups, state)
        for group_id, own in state.items():
            acting = self.acting_parameters(own)  # [P]
            if acting is not own["parameters"]:
                named[group_id][ACTING] = self._groups[group_id].named(acting)
        return arrays_like(named, copied=True)

    def state_from_tree(self, tree: Tree, like: State) -> State:
        return from_names(tensors_like(without_acting(tree), by_name(self._groups, like)))

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
        return counting_each(begun) if len(group.modules) > 1 or self.counts_each else begun
