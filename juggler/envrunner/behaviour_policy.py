"""The policy that acts in an EnvRunner's environments."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from juggler.runtime.connectors.actions import ClipActions
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, MODULE_STATE
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


class BehaviourPolicy:
    """A module, its action distribution, and its recurrent state.

    Each fragment takes one `begin`, then `act` for each step, then `finish`. The noise of a
    fragment is drawn in `begin`, and the log-probabilities are computed in `finish`, all at once.

    The "actions" that a module returns are used as they are. Their log-probabilities come from
    its "action_dist_inputs"; without these they are 0, as those of a deterministic policy.

    Args:
        module: acts as an `ArrayModule`.
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
        self._module = ArrayModule(module, rows)
        self._rows, self._steps = rows, steps
        self._generator = torch.Generator()
        space = module.action_space
        clip = ClipActions(module.observation_space, space)
        connect = module_to_env or ModuleToEnv([clip], space, space)
        self._module_to_env = None if connect.idle else connect
        self._one_array = isinstance(zeros(space), np.ndarray)
        self.chosen: Any = None
        self._state = self._module.initial_states(rows)  # [N, ...]
        self._row_state = self._state
        self.remembers = bool(self._state)
        self._distribution = self._module.distribution
        self.knows_log_probabilities = self._distribution is not None
        self._noise: NDArray[np.float32] | None = None  # [T, N, M]
        self._inputs: list[NDArray[Any]] = []  # T x [N, D]
        self._actions: list[Any] = []  # T x [N, ...]
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seed the noise."""
        self._generator.manual_seed(seed)

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters and buffers that `load` takes."""
        return self._module.names

    def take_notes(self) -> list[training_pb2.Note]:
        """What is to be said of how it acts, each once."""
        return notes_of(self._module)

    def load(self, weights: Tree) -> None:
        """Load weights: arrays by the names of parameters and buffers.

        Raises:
            ValueError: they are another module's.
        """
        self._module.load(weights)

    def begin(self) -> None:
        """Begin a fragment: draw its noise."""
        self._inputs, self._actions = [], []
        if self._module.draws and self._distribution is not None:
            noise = self._distribution.draw_noise((self._steps, self._rows), self._generator)
            self._noise = noise.numpy()  # [T, N, M]

    def act(self, observations: Any, step: int, first: NDArray[np.bool_] | None = None) -> Any:
        """Choose the actions of one step of the fragment.

        Args:
            observations: a tree of arrays [N, ...].
            step: from 0, in order.
            first: [N] which observations are an episode's first; needed if `remembers`.

        Returns:
            Actions for `env.step`: arrays [N, ...] of their own, which environments may keep.
        """
        self._restart(first)
        if step == 0:
            self._row_state = tree_map(np.copy, self._state)  # [N, ...]
        noise = None if self._noise is None else self._noise[step]  # [N, M]
        actions, inputs, self._state = self._module.explore(observations, self._state, noise)
        if inputs is not None:
            self._inputs.append(inputs)
        self._actions.append(actions)
        return self._for_environments(actions)

    def finish(self) -> tuple[Tree, NDArray[np.float32], dict[str, Tree]]:
        """End a fragment.

        Returns:
            The chosen actions [N, T, ...], their log-probabilities [N, T], and the recurrent state
            at the start of each row [N, ...], as in `EpisodeBatch.states`.
        """
        states = {MODULE_STATE: self._row_state} if self.remembers else {}
        actions: Tree = tree_map(_over_steps, *self._actions)  # [N, T, ...]
        if self._distribution is None:
            return actions, np.zeros((self._rows, self._steps), np.float32), states
        with torch.inference_mode():
            inputs = torch.from_numpy(_over_steps(*self._inputs))  # [N, T, D]
            logp = self._distribution(inputs).log_prob(tree_map(torch.from_numpy, actions))
            return actions, logp.float().contiguous().numpy(), states

    def why_not_finite(self, row: int, step: int) -> str:
        """Explain why a log-probability of the last fragment is not finite; "" if unknown."""
        if self._distribution is None:
            return ""
        return self._distribution.why_not_finite(torch.from_numpy(self._inputs[step][row]))

    def act_deterministically(
        self, observations: Tree, first: NDArray[np.bool_] | None = None
    ) -> Any:
        """Choose the best actions, without exploration.

        Args:
            observations: a tree of arrays [N, ...].
            first: as in `act`.
        """
        self._restart(first)
        # Actions and states may share their memory, which environments may write to.
        own = tree_map(np.copy, observations)  # [N, ...]
        actions, _, self._state = self._module.infer(own, self._state)
        return self._for_environments(actions)

    def _restart(self, first: NDArray[np.bool_] | None) -> None:
        """Begin with new states [N, ...] where episodes begin."""
        if self.remembers and first is not None and first.any():
            self._state = self._module.restarted(self._state, first)

    def _for_environments(self, actions: Any) -> Any:
        """Chosen actions as arrays [N, ...] that the environments may keep."""
        self.chosen = actions
        sent = actions.copy() if self._one_array else tree_map(np.copy, actions)  # [N, ...]
        return sent if self._module_to_env is None else self._module_to_env(sent)


def _over_steps(*leaves: NDArray[Any]) -> NDArray[Any]:
    """Stack T arrays [N, ...] to [N, T, ...]."""
    return np.stack(leaves, 1)


def notes_of(module: ArrayModule) -> list[training_pb2.Note]:
    """What is to be said of how a module acts, each once."""
    text, module.note = module.note, ""
    return [training_pb2.Note(text=text, warning=module.differed)] if text else []


def require_log_probabilities(module: RLModule, known: bool) -> None:
    """Raise ValueError unless the log-probabilities are `known`, which every algorithm needs."""
    if not known:
        raise ValueError(
            f"{type(module).__name__} returns {ACTIONS!r} without {ACTION_DIST_INPUTS!r} where it "
            "explores: algorithms need the log-probabilities of actions to tell how far the policy "
            f"has moved since. Return {ACTION_DIST_INPUTS!r} as well, or instead: then actions are "
            "sampled from them"
        )
