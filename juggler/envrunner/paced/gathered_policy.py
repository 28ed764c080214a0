"""A policy that acts for any of its agents, each at its own pace."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from types import FrameType
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from numpy.typing import NDArray
from torch import Tensor

from juggler.envrunner.behaviour_policy import notes_of, require_log_probabilities
from juggler.envrunner.environments.seeding import noise_seed
from juggler.envrunner.paced.places import grown, put, room_for, take
from juggler.runtime.connectors.acting_graph import ActingGraph
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.columns import CONNECTOR_STATES, MODULE_STATE, OBSERVATIONS, STATES
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

#: Numbers that are drawn at once: drawing a few takes as long as drawing these.
_NOISE_AHEAD = 4096


class GatheredPolicy:
    """A module that acts for any B of S agents at a time, and keeps a state for each of them.

    Each agent has a place. S is 1 until `grow` is called.

    Args:
        module: as of `BehaviourPolicy`.
        connectors: those with contexts add what came before.
        module_to_env: turns chosen actions into those that environments get.
        seed: of the noise.

    Attributes:
        blank_inputs: zeros [D], in the shape of the distribution's inputs.
        remembers: the module has a recurrent state, or a connector has contexts.

    Raises:
        ValueError: the module returns no inputs of an action distribution.
    """

    def __init__(
        self,
        module: RLModule,
        connectors: EnvToModule,
        module_to_env: ModuleToEnv,
        seed: int,
    ) -> None:
        self._module = ArrayModule(module)
        self._env_to_module = connectors
        self._contexts = _Contexts(connectors)
        self._module_to_env = module_to_env
        self._generator = torch.Generator()
        self.seed(seed)
        like = self._module.initial_states(1)  # [1, ...]
        self._has_state = bool(like)
        self.remembers = self._has_state or self._contexts.any
        self._states = room_for(like, 1)  # [S, ...] before the next step
        self._before = room_for(like, 1)  # [S, ...] before the last one
        require_log_probabilities(module, self._module.distribution is not None)
        self._distribution = module.action_distribution()
        self.blank_inputs = self._module.blank_inputs

    @property
    def action_space(self) -> Space[Any]:
        """Of the actions that the module chooses."""
        return self._module_to_env.action_space

    def graph(self, observation_space: Space[Any], action_space: Space[Any]) -> ActingGraph:
        """A copy for export, with the spaces of simulators.

        Raises:
            ValueError: something in it cannot be exported.
            NotImplementedError: the same.
        """
        return ActingGraph(
            deepcopy(self._module.module),
            self._env_to_module,
            self._module_to_env,
            observation_space,
            action_space,
            explores=True,
        )

    def constants(self) -> dict[str, NDArray[Any]]:
        """Values of the graph that change during a run, by their names there; views."""
        weights = {f"module.{name}": array for name, array in self._module.weights().items()}
        return {**weights, **self._env_to_module.numbers()}

    def seed(self, seed: int) -> None:
        """Start the noise anew."""
        self._generator.manual_seed(noise_seed(seed))
        # [L, M], and its last unused entries.
        self._noise, self._noise_left = np.zeros((0, 0), np.float32), 0

    def grow(self, capacity: int) -> None:
        """Make room for more agents."""
        self._states, self._before = grown(self._states, capacity), grown(self._before, capacity)
        self._contexts.grow(capacity)

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

    def act(
        self, observations: Any, places: NDArray[np.intp], first: NDArray[np.bool_]
    ) -> tuple[Any, Any, NDArray[np.float32]]:
        """Choose the actions of some agents.

        Args:
            observations: a tree of arrays [B, ...], as batches hold them.
            places: [B] of the agents, none of them twice.
            first: [B] which observations are the first of an episode.

        Returns:
            The actions for environments, as Gymnasium has them; the chosen actions, a tree
            [B, ...]; and the inputs [B, D] of their distribution. Nothing else uses their memory.
        """
        seen = self._contexts.see(observations, places, first)
        noise = self._next_noise(len(places)) if self._module.draws else None
        states = self._begun(places, first)
        chosen, inputs, states = self._module.explore(seen, states, noise)
        put(self._states, places, states)
        return self._sent(chosen, places), chosen, np.array(inputs, np.float32)

    def _next_noise(self, count: int) -> NDArray[np.float32]:
        """The noise [B, M] of the next actions, which is drawn for many of them at once."""
        if self._noise_left < count:
            ahead = max(count, _NOISE_AHEAD // max(1, self._distribution.noise_size))
            drawn = self._distribution.draw_noise((ahead,), self._generator)  # [L, M]
            self._noise = drawn.numpy()
            self._noise_left = ahead
        begin, self._noise_left = -self._noise_left, self._noise_left - count
        return self._noise[begin : -self._noise_left or None]

    def act_deterministically(
        self, observations: Any, places: NDArray[np.intp], first: NDArray[np.bool_]
    ) -> Any:
        """Choose the best actions, without exploration -> the actions for environments.

        Args:
            observations: as in `act`.
            places: as in `act`.
            first: as in `act`.
        """
        seen = self._contexts.see(observations, places, first)
        chosen, _, states = self._module.infer(seen, self._begun(places, first))
        put(self._states, places, states)
        return self._sent(chosen, places)

    def _begun(self, places: NDArray[np.intp], first: NDArray[np.bool_]) -> Any:
        """The states [B, ...] that agents act with, new ones where episodes begin."""
        if not self._has_state:
            return {}
        states = self._module.restarted(take(self._states, places), first)  # [B, ...]
        put(self._before, places, states)
        return states

    def _sent(self, chosen: Any, places: NDArray[np.intp]) -> Any:
        self._contexts.chose(chosen, places)
        return self.for_environments(chosen)

    def for_environments(self, chosen: Any) -> Any:
        """Chosen actions [B, ...], as environments get them."""
        return self._module_to_env(tree_map(np.copy, chosen))

    def rewarded(self, places: NDArray[np.intp], rewards: NDArray[np.floating[Any]]) -> None:
        """Take the rewards [B] of the last actions of some agents."""
        if self._contexts.any:
            self._contexts.rewarded(places, rewards.astype(np.float32))

    def follow(
        self,
        place: int,
        observations: Any,
        actions: Any,
        rewards: NDArray[np.float32],
        first: bool,
    ) -> dict[str, Tree]:
        """Follow steps that somebody else took -> the states before them, as `states_before`.

        Args:
            place: of the agent.
            observations: [L, ...] before each step, as batches hold them.
            actions: [L, ...] chosen there.
            rewards: [L]
            first: the first of them begins an episode.
        """
        states: dict[str, Tree] = {}
        if not (self._has_state or self._contexts.any):
            return states
        places, seen = np.array([place]), []
        for t in range(len(rewards)):
            now = slice(t, t + 1)
            begins = np.array([first and t == 0])
            seen.append(self._contexts.see(take(observations, now), places, begins))
            if t == 0 and self._contexts.any:
                states[CONNECTOR_STATES] = self._contexts.of(places)
            self._contexts.chose(take(actions, now), places)
            self._contexts.rewarded(places, rewards[now])
        if self._has_state:
            kept = self._module.restarted(take(self._states, places), np.array([first]))  # [1, ...]
            states[MODULE_STATE] = kept
            sequence = tree_map(
                lambda *steps: torch.from_numpy(np.concatenate(steps)[None]), *seen
            )  # [1, L, ...]
            with torch.inference_mode():
                before = tree_map(torch.from_numpy, kept)  # [1, ...]
                batch = {OBSERVATIONS: sequence, STATES: before}
                outputs = self._module.module.forward_exploration(batch)
            put(self._states, places, tree_map(Tensor.numpy, outputs[STATES]))
        return states

    def states_before(self, places: NDArray[np.intp]) -> dict[str, Tree]:
        """The states of agents [B] before their last step, as in `EpisodeBatch.states`."""
        states: dict[str, Tree] = {}
        if self._has_state:
            states[MODULE_STATE] = take(self._before, places)
        if self._contexts.any:
            states[CONNECTOR_STATES] = self._contexts.of(places)
        return states

    def log_probabilities(self, inputs: NDArray[np.float32], actions: Tree) -> NDArray[np.float32]:
        """[N, T] of actions [N, T, ...] that were chosen with inputs [N, T, D]."""
        with torch.inference_mode():
            chosen = tree_map(torch.from_numpy, actions)  # [N, T, ...]
            logp = self._distribution(torch.from_numpy(inputs)).log_prob(chosen)  # [N, T]
            return logp.float().contiguous().numpy()

    def why_not_finite(self, inputs: NDArray[np.float32]) -> str:
        """Explain why the log-probability of inputs [D] is not finite; "" if unknown."""
        return self._distribution.why_not_finite(torch.from_numpy(inputs))


def policy_in(frame: FrameType | None) -> str:
    """For people: what a thread of a gateway does, from its innermost frame."""
    while frame is not None:
        if frame.f_code is GatheredPolicy.act.__code__:
            return f"inference by {type(frame.f_locals['self']._module.module).__name__}"
        frame = frame.f_back
    return "the gateway"


class _Contexts:
    """The contexts of connectors for S agents, each at its own pace.

    Memory is taken when the first of them acts: shapes are not known before.
    """

    def __init__(self, connectors: EnvToModule) -> None:
        self._connectors = connectors.contexts
        self._capacity = 1
        self._contexts: dict[str, Any] = {}  # [S, ...] of the last step
        self._seen: dict[str, Any] = {}  # [S, ...] what each connector got then
        self._chosen: Any = None  # [S, ...]

    @property
    def any(self) -> bool:
        return bool(self._connectors)

    def grow(self, capacity: int) -> None:
        self._capacity = capacity
        self._contexts, self._seen = grown(self._contexts, capacity), grown(self._seen, capacity)
        self._chosen = None if self._chosen is None else grown(self._chosen, capacity)

    def see(self, observations: Any, places: NDArray[np.intp], first: NDArray[np.bool_]) -> Any:
        """Observations as the module gets them [B, ...]."""
        if not self._connectors:
            return observations
        begin = np.flatnonzero(first)
        for name, connector in self._connectors.items():
            if name not in self._contexts:
                self._seen[name] = room_for(observations, self._capacity)
                self._contexts[name] = room_for(connector.initial(observations), self._capacity)
            put(self._seen[name], places, observations)
            if len(begin):
                fresh = connector.initial(take(observations, begin))
                put(self._contexts[name], places[begin], fresh)
            observations = connector(observations, take(self._contexts[name], places))
        return observations

    def chose(self, actions: Any, places: NDArray[np.intp]) -> None:
        if self._connectors:
            if self._chosen is None:
                self._chosen = room_for(actions, self._capacity)
            put(self._chosen, places, actions)

    def rewarded(self, places: NDArray[np.intp], rewards: NDArray[np.float32]) -> None:
        for name, connector in self._connectors.items():
            after = connector.advance(
                take(self._contexts[name], places),
                take(self._seen[name], places),
                take(self._chosen, places),
                rewards,
            )
            put(self._contexts[name], places, after)

    def of(self, places: NDArray[np.intp]) -> dict[str, Tree]:
        return {name: take(self._contexts[name], places) for name in self._connectors}
