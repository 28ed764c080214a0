"""The policy that acts in an EnvRunner's environments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.actions import ClipActions
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTIONS,
    MODULE_STATE,
    OBSERVATIONS,
)
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.modules.stepping import (
    best_actions,
    initial_states,
    load_weights,
    one_step,
    restarted,
    weights_of,
)
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree


class BehaviourPolicy:
    """A module, its action distribution, and its recurrent state.

    Each fragment takes one `begin`, then `act` for each step, then `finish`. The noise of a
    fragment is drawn in `begin`, and the log-probabilities are computed in `finish`, all at once.

    The "actions" that a module returns are used as they are. Their log-probabilities come from
    its "action_dist_inputs"; without these they are 0, as those of a deterministic policy.

    Args:
        module: is put into evaluation mode (no dropout), since its log-probabilities must be those
            of the policy that learns.
        rows: N, environments.
        steps: T, steps of a fragment.
        seed: of the noise.
        module_to_env: maps chosen actions to the environments' actions; none: clips them to Box
            bounds. Batches hold the chosen actions, which log-probabilities belong to.

    Attributes:
        knows_log_probabilities: whether the module returns "action_dist_inputs".
        remembers: whether the module has a recurrent state, so that `act` needs `first`.
        chosen: the module's actions at the last step, a tree of arrays [N, ...].

    Raises:
        ValueError: the module's outputs do not follow its contract.
    """

    def __init__(
        self,
        module: RLModule,
        rows: int,
        steps: int,
        seed: int,
        module_to_env: ModuleToEnv | None = None,
    ) -> None:
        self._module = module.eval()
        self._weights = weights_of(module)
        self._rows, self._steps = rows, steps
        self._generator = torch.Generator()
        space = module.action_space
        clip = ClipActions(module.observation_space, space)
        connect = module_to_env or ModuleToEnv([clip], space, space)
        self._module_to_env = None if connect.idle else connect
        self._one_array = isinstance(zeros(space), np.ndarray)
        self.chosen: Any = None
        self._initial_state = initial_states(self._module, self._rows)
        self.remembers = bool(self._initial_state)
        self._state = tree_map(torch.clone, self._initial_state)  # [N, ...]
        self._row_state = self._state
        outputs = self._first_outputs()
        self._draws = ACTIONS not in outputs
        self.knows_log_probabilities = ACTION_DIST_INPUTS in outputs
        if self.knows_log_probabilities:
            self._distribution = module.action_distribution()
        self._noise: tuple[Tensor, ...] = ()  # T x [N, M]
        self._inputs: list[Tensor] = []  # T x [N, D]
        self._actions: list[Any] = []  # T x [N, ...]
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seed the noise."""
        self._generator.manual_seed(seed)

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters and buffers that `load` takes."""
        return self._weights.keys()

    def load(self, weights: Tree) -> None:
        """Load weights: arrays by the names of parameters and buffers.

        Raises:
            ValueError: they are another module's.
        """
        load_weights(self._weights, weights)
        self._initial_state = initial_states(self._module, self._rows)  # may be learned

    def begin(self) -> None:
        """Begin a fragment: draw its noise."""
        self._inputs, self._actions = [], []
        if self._draws:
            noise = self._distribution.draw_noise((self._steps, self._rows), self._generator)
            self._noise = noise.unbind(0)  # T x [N, M]

    def act(self, observations: Any, step: int, first: NDArray[np.bool_] | None = None) -> Any:
        """Choose the actions of one step of the fragment.

        Args:
            observations: a tree of tensors [N, ...].
            step: from 0, in order.
            first: [N] which observations are an episode's first; needed if `remembers`.

        Returns:
            Actions for `env.step`: arrays [N, ...] of their own, which environments may keep.
        """
        with torch.inference_mode():
            outputs = self._run(self._module.forward_exploration, observations, first, step)
            if self.knows_log_probabilities:
                inputs = outputs[ACTION_DIST_INPUTS]  # [N, D]
                self._inputs.append(inputs)
            if self._draws:
                actions = self._distribution(inputs).sample(self._noise[step])  # [N, ...]
            else:
                actions = outputs[ACTIONS]  # [N, ...]
            self._actions.append(actions)
        return self._for_environments(actions)

    def finish(self) -> tuple[Tree, NDArray[np.float32], dict[str, Tree]]:
        """End a fragment.

        Returns:
            The chosen actions [N, T, ...], their log-probabilities [N, T], and the recurrent state
            at the start of each row [N, ...], as in `EpisodeBatch.states`.
        """
        states = {MODULE_STATE: tree_map(Tensor.numpy, self._row_state)} if self.remembers else {}
        with torch.inference_mode():
            actions = tree_map(_over_steps, *self._actions)  # [N, T, ...]
            arrays: Tree = tree_map(Tensor.numpy, actions)
            if not self.knows_log_probabilities:
                return arrays, np.zeros((self._rows, self._steps), np.float32), states
            logp = self._distribution(_over_steps(*self._inputs)).log_prob(actions)  # [N, T]
            return arrays, logp.float().contiguous().numpy(), states

    def why_not_finite(self, row: int, step: int) -> str:
        """Explain why a log-probability of the last fragment is not finite; "" if unknown."""
        if not self.knows_log_probabilities:
            return ""
        return self._distribution.why_not_finite(self._inputs[step][row])

    def act_deterministically(
        self, observations: Tree, first: NDArray[np.bool_] | None = None
    ) -> Any:
        """Choose the best actions, without exploration.

        Args:
            observations: a tree of arrays [N, ...].
            first: as in `act`.
        """
        with torch.inference_mode():
            tensors = tree_map(torch.tensor, observations)  # [N, ...]
            outputs = self._run(self._module.forward_inference, tensors, first)
            actions = best_actions(self._module, outputs)  # [N, ...]
        return self._for_environments(actions)

    def _for_environments(self, actions: Any) -> Any:
        """Map chosen actions to arrays [N, ...] that the environments may keep."""
        if self._one_array:
            self.chosen = actions.numpy()  # [N, ...]
            sent = self.chosen.copy()  # [N, ...]
        else:
            self.chosen = tree_map(Tensor.numpy, actions)  # [N, ...]
            sent = tree_map(np.copy, self.chosen)  # [N, ...]
        return sent if self._module_to_env is None else self._module_to_env(sent)

    def _run(
        self,
        forward: Callable[[Any], dict[str, Any]],
        observations: Any,
        first: NDArray[np.bool_] | None,
        step: int = -1,
    ) -> dict[str, Any]:
        """Run one step of the module on tensors [N, ...], with its recurrent state if any."""
        if first is None or not self.remembers:
            return forward({OBSERVATIONS: observations})
        if first.any():
            self._state = restarted(self._state, self._initial_state, torch.from_numpy(first))
        if step == 0:
            self._row_state = tree_map(torch.clone, self._state)  # [N, ...]
        outputs, self._state = one_step(forward, observations, self._state)  # [N, ...]
        return outputs

    def _first_outputs(self) -> dict[str, Any]:
        """Run the module once, on blank observations, to see which outputs it has."""
        blank = zeros(self._module.observation_space, (self._rows,))
        tensors = tree_map(torch.from_numpy, blank)  # [N, ...]
        with torch.inference_mode():
            return self._run(self._module.forward_exploration, tensors, np.zeros(self._rows, bool))


def _over_steps(*leaves: Tensor) -> Tensor:
    """Stack T tensors [N, ...] to [N, T, ...]."""
    return torch.stack(leaves, 1)


def require_log_probabilities(module: RLModule, known: bool) -> None:
    """Raise ValueError unless the log-probabilities are `known`, which every algorithm needs."""
    if not known:
        raise ValueError(
            f"{type(module).__name__} returns {ACTIONS!r} without {ACTION_DIST_INPUTS!r} where it "
            "explores: algorithms need the log-probabilities of actions to tell how far the policy "
            f"has moved since. Return {ACTION_DIST_INPUTS!r} as well, or instead: then actions are "
            "sampled from them"
        )
