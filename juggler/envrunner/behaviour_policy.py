"""The policy that acts in a runner's environments."""

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
    """A module, its action distribution, and the state that it carries from step to step.

    For every fragment: `begin`, then `act` once for each step, then `finish`. All noise of a
    fragment is drawn at once, and log-probabilities are computed at once at its end.

    A module that returns "actions" has them used as they are; with "action_dist_inputs" beside
    them, these give their log-probabilities, and without, the log-probability is 0: the policy is
    taken as deterministic.

    Args:
        module: acts in evaluation mode (no dropout), as its log-probabilities must be those of
            the policy that learns.
        rows: N, environments.
        steps: T, steps of a fragment.
        seed: of the noise.
        module_to_env: makes what the environments get of what was chosen; none: it is clipped to
            the bounds of Box spaces. Episodes hold what was chosen: log-probabilities belong to
            that.

    Attributes:
        knows_log_probabilities: whether the module says of what distribution its actions are.
        remembers: whether it has to be told where episodes start.
        chosen: what the module chose at the last step, a tree of arrays [N, ...].

    Raises:
        ValueError: the module's outputs are not what they must be.
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
        """Start the noise anew."""
        self._generator.manual_seed(seed)

    @property
    def names(self) -> Collection[str]:
        """Of the parameters and buffers that `load` takes."""
        return self._weights.keys()

    def load(self, weights: Tree) -> None:
        """Take weights from the network: arrays by the names of parameters and buffers.

        Raises:
            ValueError: they are another module's.
        """
        load_weights(self._weights, weights)
        self._initial_state = initial_states(self._module, self._rows)  # it may be learned

    def begin(self) -> None:
        """Start a fragment: draw its noise."""
        self._inputs, self._actions = [], []
        if self._draws:
            noise = self._distribution.draw_noise((self._steps, self._rows), self._generator)
            self._noise = noise.unbind(0)  # T x [N, M]

    def act(self, observations: Any, step: int, first: NDArray[np.bool_] | None = None) -> Any:
        """Choose the actions of one step of the fragment.

        Args:
            observations: a tree of tensors [N, ...].
            step: from 0, in order.
            first: [N] which of them are the first of an episode. Only who remembers needs it.

        Returns:
            What the environments get, as Gymnasium wants it: of arrays [N, ...] of its own, which
            they may keep.
        """
        with torch.inference_mode():
            if first is None or not self.remembers:
                outputs = self._module.forward_exploration({OBSERVATIONS: observations})
            else:
                self._restart(first)
                if step == 0:
                    self._row_state = tree_map(torch.clone, self._state)
                outputs = self._step_on(self._module.forward_exploration, observations)
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
        """The fragment's actions [N, T, ...] as chosen, their log-probabilities [N, T], and what
        was remembered at the start of each row [N, ...], as `EpisodeBatch.states` has it."""
        states = {MODULE_STATE: tree_map(Tensor.numpy, self._row_state)} if self.remembers else {}
        with torch.inference_mode():
            actions = tree_map(_over_steps, *self._actions)  # [N, T, ...]
            arrays: Tree = tree_map(Tensor.numpy, actions)
            if not self.knows_log_probabilities:
                return arrays, np.zeros((self._rows, self._steps), np.float32), states
            logp = self._distribution(_over_steps(*self._inputs)).log_prob(actions)  # [N, T]
            return arrays, logp.float().contiguous().numpy(), states

    def why_not_finite(self, row: int, step: int) -> str:
        """For people: what is wrong with a policy whose log-probability at a step of the last
        fragment is not finite; empty where nothing is to be seen."""
        if not self.knows_log_probabilities:
            return ""
        return self._distribution.why_not_finite(self._inputs[step][row])

    def act_deterministically(
        self, observations: Tree, first: NDArray[np.bool_] | None = None
    ) -> Any:
        """What the module thinks best, for the environments.

        Args:
            observations: a tree of arrays [N, ...].
            first: as in `act`.
        """
        with torch.inference_mode():
            tensors = tree_map(torch.tensor, observations)  # [N, ...]
            if first is None or not self.remembers:
                outputs = self._module.forward_inference({OBSERVATIONS: tensors})
            else:
                self._restart(first)
                outputs = self._step_on(self._module.forward_inference, tensors)
            actions = best_actions(self._module, outputs)  # [N, ...]
        return self._for_environments(actions)

    def _for_environments(self, actions: Any) -> Any:
        """What environments get, of which they may keep the memory."""
        if self._one_array:
            self.chosen = actions.numpy()  # [N, ...]
            sent = self.chosen.copy()  # [N, ...]
        else:
            self.chosen = tree_map(Tensor.numpy, actions)  # [N, ...]
            sent = tree_map(np.copy, self.chosen)  # [N, ...]
        return sent if self._module_to_env is None else self._module_to_env(sent)

    # -- what is remembered ---------------------------------------------------------------------

    def _restart(self, first: NDArray[np.bool_]) -> None:
        if not first.any():
            return
        self._state = restarted(self._state, self._initial_state, torch.from_numpy(first))

    def _step_on(
        self, forward: Callable[[Any], dict[str, Any]], observations: Any
    ) -> dict[str, Any]:
        """One step of a recurrent module."""
        outputs, self._state = one_step(forward, observations, self._state)  # [N, ...]
        return outputs

    def _first_outputs(self) -> dict[str, Any]:
        """What the module returns, from a pass over the least observations there are."""
        blank = zeros(self._module.observation_space, (self._rows,))
        tensors = tree_map(torch.from_numpy, blank)  # [N, ...]
        with torch.inference_mode():
            if self.remembers:
                return self._step_on(self._module.forward_exploration, tensors)
            return self._module.forward_exploration({OBSERVATIONS: tensors})


def _over_steps(*leaves: Tensor) -> Tensor:
    """T tensors [N, ...] -> [N, T, ...]."""
    return torch.stack(leaves, 1)


def require_log_probabilities(module: RLModule, known: bool) -> None:
    """
    Args:
        module: acts.
        known: whether it says of what distribution its actions are.

    Raises:
        ValueError: it does not, and a learner would take every action for a certain one.
    """
    if not known:
        raise ValueError(
            f"{type(module).__name__} returns {ACTIONS!r} without {ACTION_DIST_INPUTS!r} where it "
            "explores: how far the policy has moved since then is known from the log-probabilities "
            f"of its actions alone. Return {ACTION_DIST_INPUTS!r} beside them, or these alone, and "
            "actions are drawn"
        )
