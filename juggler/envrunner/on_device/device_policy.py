"""The policy that acts where the environments are."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTIONS,
    MODULE_STATE,
    OBSERVATIONS,
)
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.modules.stepping import (
    initial_states,
    load_weights,
    one_step,
    restarted,
    weights_of,
)
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree


class DevicePolicy(BehaviourPolicy):
    """A `BehaviourPolicy` that explores on a device.

    `act` takes and returns tensors there, and waits for nothing. It draws the same noise as a
    `BehaviourPolicy`, so it chooses the same actions up to rounding. Evaluations act on the host,
    with arrays.

    Args:
        module: as in `BehaviourPolicy`; a copy of it acts on the device.
        rows: N, environments.
        steps: T, steps of a fragment.
        seed: of the noise.
        module_to_env: as in `BehaviourPolicy`; its connectors take tensors.
        device: of the environments.
    """

    def __init__(
        self,
        module: RLModule,
        rows: int,
        steps: int,
        seed: int,
        module_to_env: ModuleToEnv,
        device: torch.device,
    ) -> None:
        super().__init__(module, rows, steps, seed, module_to_env)
        self.device = device
        self._there = copy.deepcopy(module).to(device)
        self._weights_there = weights_of(self._there)
        self._initial: Any = {}  # [N, ...]
        self._states: Any = None  # [N, ...]; None: new ones
        self._starts: Any = {}  # [N, ...] before the fragment's first step
        self._noise_there: Tensor | None = None  # [T, N, M]
        self._inputs_there: list[Tensor] = []  # T x [N, D]
        self._actions_there: list[Any] = []  # T x [N, ...]

    def load(self, weights: Tree) -> None:
        """See `BehaviourPolicy`."""
        super().load(weights)
        load_weights(self._weights_there, weights)

    def begin(self) -> None:
        """See `BehaviourPolicy`."""
        super().begin()
        self._inputs_there, self._actions_there = [], []
        if self._noise is not None:
            self._noise_there = torch.from_numpy(self._noise).to(self.device)  # [T, N, M]
        if self.remembers:
            # They may be learned, and a module may make them where it likes.
            made = initial_states(self._there, self._rows)  # [N, ...]
            self._initial = tree_map(lambda leaf: leaf.to(self.device), made)  # [N, ...]

    def act(self, observations: Any, step: int, first: Any = None) -> Any:
        """Choose the actions of one step of the fragment.

        Args:
            observations: a tree of tensors [N, ...] on the device.
            step: from 0, in order.
            first: [N], a tensor on the device; needed if the module remembers.

        Returns:
            Actions for the environments: tensors [N, ...] of their own on the device.
        """
        with torch.no_grad():
            forward = self._there.forward_exploration
            if self.remembers:
                if self._states is None:
                    self._states = self._initial
                self._states = restarted(self._states, self._initial, first)  # [N, ...]
                if step == 0:
                    self._starts = self._states
                outputs, self._states = one_step(forward, observations, self._states)
            else:
                outputs = forward({OBSERVATIONS: observations})
            if ACTION_DIST_INPUTS in outputs:
                self._inputs_there.append(outputs[ACTION_DIST_INPUTS])  # [N, D]
            if ACTIONS in outputs:
                actions = outputs[ACTIONS]  # [N, ...]
            else:
                assert self._distribution is not None
                assert self._noise_there is not None
                each = self._distribution(outputs[ACTION_DIST_INPUTS])
                actions = each.sample(self._noise_there[step])  # [N, ...]
            self._actions_there.append(actions)
            sent = tree_map(torch.clone, actions)  # [N, ...]
            return sent if self._module_to_env is None else self._module_to_env(sent)

    def finish(self) -> tuple[Tree, NDArray[np.float32], dict[str, Tree]]:
        """See `BehaviourPolicy`; here the results of a fragment come to the host."""
        with torch.no_grad():
            actions = tree_map(_over_steps, *self._actions_there)  # [N, T, ...]
            logp = np.zeros((self._rows, self._steps), np.float32)
            if self._distribution is not None:
                inputs = _over_steps(*self._inputs_there)  # [N, T, D]
                logp = _array(self._distribution(inputs).log_prob(actions).float())
        states = {MODULE_STATE: tree_map(_array, self._starts)} if self.remembers else {}
        return tree_map(_array, actions), logp, states

    def why_not_finite(self, row: int, step: int) -> str:
        """See `BehaviourPolicy`."""
        if self._distribution is None:
            return ""
        return self._distribution.why_not_finite(self._inputs_there[step][row].cpu())

    def restart(self) -> None:
        """Begin anew in all environments."""
        self._states = None


def _over_steps(*leaves: Tensor) -> Tensor:
    """Stack T tensors [N, ...] to [N, T, ...]."""
    return torch.stack(leaves, 1)


def _array(tensor: Tensor) -> NDArray[Any]:
    """An array [...] with memory of its own."""
    array: NDArray[Any] = tensor.to("cpu", copy=True).numpy()
    return array
