"""One step of acting: connectors, memory, module, draw, and action connectors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy, deepcopy
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.connectors.connector import ContextConnector
from juggler.runtime.connectors.encoding import ClipActions
from juggler.runtime.connectors.leaves import in_dtype
from juggler.runtime.connectors.pipelines import EnvToModule, ModuleToEnv
from juggler.runtime.modules.acting_part import restarted
from juggler.runtime.modules.array_module import ActingStep, ArrayModule, TensorModule
from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTION_MASK,
    ACTIONS,
    CONNECTOR_STATES,
    MODULE_STATE,
)
from juggler.runtime.modules.distributions.for_space import distribution_for
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import (
    first_leaf,
    grown,
    put,
    room_for,
    take,
    to_tree,
    tree_map,
    zeros,
)
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

RowIndices = NDArray[np.intp]
Bools = NDArray[np.bool_]

#: Numbers drawn at once: drawing fewer takes the same time.
_NOISE_AHEAD = 4096

#: With equal logits, every action of these spaces is equally likely.
_CHOICES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

#: Names of trees in a memory, in addition to the connectors' names.
STATE: Final = "module"
CHOSEN: Final = "chosen"
SEEN: Final = "seen/"
_BEFORE: Final = "before"


class Acted(NamedTuple):
    """One step of B rows.

    Attributes:
        sent: actions for environments, as in Gymnasium, in their own memory; given actions are
            passed through.
        chosen: the module's actions [B, ...], as in batches.
        inputs: inputs of their distribution [B, D]; None: the module returns no inputs.
    """

    sent: Any
    chosen: Any
    inputs: Any


class RowMemory:
    """Trees [S, ...] of S rows, by name.

    `set` of all rows replaces a tree and changes no array; `set` of places writes into it.

    Args:
        trees: by name.
    """

    def __init__(self, trees: Mapping[str, Any] | None = None) -> None:
        self.trees: dict[str, Any] = dict(trees or {})
        self._rows = 1

    def grow(self, rows: int) -> None:
        """Make room for more rows."""
        self.trees, self._rows = grown(self.trees, rows), rows

    def get(self, name: str, places: RowIndices | None) -> Any:
        """Return all rows of a tree, or copies of rows [B]."""
        return self.trees[name] if places is None else take(self.trees[name], places)

    def set(self, name: str, places: RowIndices | None, values: Any) -> None:
        """Store all rows, or the rows at places [B]."""
        if places is None:
            self.trees[name] = values
            return
        if name not in self.trees:
            self.trees[name] = room_for(values, self._rows)
        put(self.trees[name], places, values)


class Contexts:
    """The contexts of connectors for S rows, from step to step.

    Each step takes one `see`, then one `advance`.

    Args:
        connectors: context connectors by name, in order.
        memory: keeps the contexts; none: a new one.
    """

    def __init__(
        self, connectors: Mapping[str, ContextConnector], memory: RowMemory | None = None
    ) -> None:
        self.connectors = dict(connectors)
        self.memory = memory or RowMemory()

    def see(self, observations: Any, first: Any, places: RowIndices | None = None) -> Any:
        """Return the module's observations [B, ...].

        Args:
            observations: [B, ...] as batches hold them.
            first: [B], whether each begins an episode.
            places: [B] of the rows; None: all of them.
        """
        for name, connector in self.connectors.items():
            self.memory.set(f"{SEEN}{name}", places, observations)
            context = self._begun(name, observations, first, places)
            observations = connector(observations, context)
        return observations

    def _begun(self, name: str, observations: Any, first: Any, places: RowIndices | None) -> Any:
        """Return a connector's contexts [B, ...], new ones where episodes begin."""
        connector, key = self.connectors[name], f"connectors/{name}"
        if key not in self.memory.trees:
            context = connector.initial(observations)
        elif isinstance(first, Tensor):
            context = self.memory.get(key, places)
            context = restarted(context, connector.initial(observations), first)
        else:
            context, begin = self.memory.get(key, places), first.nonzero()[0]
            if not len(begin):
                return context
            if places is None:
                context = tree_map(_own, context)  # batches may hold the former one
            put(context, begin, connector.initial(take(observations, begin)))
        self.memory.set(key, places, context)
        return context

    def advance(self, chosen: Any, rewards: Any, places: RowIndices | None = None) -> None:
        """Advance by the last step's chosen actions and rewards [B]."""
        for name, connector in self.connectors.items():
            key = f"connectors/{name}"
            context = self.memory.get(key, places)
            seen = self.memory.get(f"{SEEN}{name}", places)
            self.memory.set(key, places, connector.advance(context, seen, chosen, rewards))

    def states(self, places: RowIndices | None = None) -> dict[str, Any]:
        """Contexts [B, ...] of the last observed step, by name."""
        return {name: self.memory.get(f"connectors/{name}", places) for name in self.connectors}


class Actor:
    """Chooses the actions of N rows, or of some B places.

    Rows that act together at each step are environments of a vector. Places act at their own pace;
    `grow` makes room for them. In both cases, states and contexts restart where `first` is true.

    Actions that a module returns are used as they are. Without "action_dist_inputs" their
    log-probabilities are 0.

    Args:
        module: an `RLModule`, or a `TensorModule` such as `RandomActions`.
        rows: N, with which the module is tried.
        steps: T of a fragment, whose noise is drawn at once; 0: no fragments.
        seed: of the noise.
        module_to_env: maps chosen actions to the environments'; none: clips them to Box bounds.
        connectors: from the environments to the module; its contexts add earlier steps. None: the
            module sees the environments' observations.
        device: of observations and actions, which are tensors, without contexts; None: arrays.
        shared: whether other code may change the module's weights.

    Attributes:
        module: as given.
        connectors: from the environments to the module. The caller applies them to observations;
            `act` adds the contexts.
        module_to_env: from chosen actions to the environments'.
        memory: states and contexts of each row.
        remembers: whether acting depends on earlier steps, so that `act` needs `first`.
        knows_log_probabilities: whether the module returns inputs of a distribution.
        blank_inputs: zeros [D], in the shape of these inputs.

    Raises:
        ValueError: the module's outputs do not follow its contract.
    """

    def __init__(
        self,
        module: RLModule | TensorModule,
        rows: int = 1,
        steps: int = 0,
        seed: int = 0,
        module_to_env: ModuleToEnv | None = None,
        connectors: EnvToModule | None = None,
        *,
        device: torch.device | None = None,
        shared: bool = False,
    ) -> None:
        self.module, self.device = module, device
        self.connectors = connectors or EnvToModule({}, {}, module.observation_space)
        space, clips = module.action_space, []
        if isinstance(module, TensorModule):
            self._acting = module
        else:
            clips = [ClipActions(module.observation_space, space)]
            # The given module may be shared, and stays on the host.
            self._acting = (
                ArrayModule(module, rows, shared)
                if device is None
                else TensorModule(deepcopy(module).to(device), rows, device)
            )
        self.module_to_env = module_to_env or ModuleToEnv(clips, space, space)
        self.memory = RowMemory()
        contexts = {} if device is not None else self.connectors.contexts
        self._contexts = Contexts(contexts, self.memory)
        self._has_state = bool(self._acting.initial_states(1))
        self.remembers = self._has_state or bool(contexts)
        self._distribution = self._acting.distribution
        self.knows_log_probabilities = self._distribution is not None
        self.blank_inputs = self._acting.blank_inputs
        # Drawing noise for a fragment takes little longer than for one step.
        size = 1 if self._distribution is None else max(1, self._distribution.noise_size)
        self._ahead = rows * steps or max(1, _NOISE_AHEAD // size)  # rows of noise
        self._generator = torch.Generator()
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seed the noise."""
        self._generator.manual_seed(noise_seed(seed))
        self._noise: Any = np.zeros((0, 0), np.float32)  # [L, M]
        self._noise_used = 0
        if isinstance(self.module, RandomActions):
            self.module.seed(seed)

    def forget(self) -> None:
        """Restart states and contexts in all rows."""
        self.memory.trees.clear()

    def with_memory(self, trees: Mapping[str, Any]) -> Actor:
        """Return the same actor with its own memory."""
        other = copy(self)
        # A module may write into the states that it gets, and these belong to the caller.
        own = {STATE: tree_map(_own, trees[STATE])} if STATE in trees else {}
        other.memory = RowMemory({**trees, **own})
        other._contexts = Contexts(self._contexts.connectors, other.memory)
        return other

    def grow(self, rows: int) -> None:
        """Make room for more places."""
        self.memory.grow(rows)

    # -- weights ---------------------------------------------------------------------------------

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters and buffers that `load` takes."""
        return self._acting.names

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """Return the weights by name, as views."""
        return self._acting.weights()

    def load(self, weights: Tree) -> None:
        """Load weights: arrays by the names of parameters and buffers.

        Raises:
            ValueError: they are for another module.
        """
        self._acting.load(weights)

    def take_notes(self) -> list[training_pb2.Note]:
        """Return warnings about how it acts, each once."""
        text, self._acting.note = self._acting.note, ""
        return [training_pb2.Note(text=text, warning=True)] if text else []

    def require_log_probabilities(self) -> None:
        """Raise ValueError unless log-probabilities are known, which algorithms need."""
        if not self.knows_log_probabilities and isinstance(self.module, RLModule):
            raise ValueError(
                f"{type(self.module).__name__} returns {ACTIONS!r} without {ACTION_DIST_INPUTS!r} "
                "when it explores: algorithms need the log-probabilities of actions to know how "
                f"far the policy has moved since. Return {ACTION_DIST_INPUTS!r} as well, or "
                "instead: then actions are sampled from them"
            )

    # -- acting ----------------------------------------------------------------------------------

    def act(
        self,
        observations: Any,
        places: RowIndices | None = None,
        first: Any = None,
        *,
        explore: bool = True,
        given: Any = None,
        noise: Any = None,
        keep: bool = True,
    ) -> Acted:
        """Choose the actions of one step.

        Args:
            observations: a tree [B, ...], as in batches, which is not changed.
            places: [B] of the rows, each once; None: all rows.
            first: [B] which observations begin an episode; needed if it `remembers`.
            explore: act as in training; otherwise take the best actions.
            given: actions [B, ...] that were chosen elsewhere; the module only keeps its state.
            noise: [B, M] of the distribution; none: drawn here.
            keep: keep the states before this step for `states_before`.
        """
        acting = self._acting
        if not explore:
            # Actions and states may share their memory, which environments may write to.
            observations = tree_map(_own, observations)  # [B, ...]
        # Modules see contexts; batches have the plain observations.
        if self._contexts.connectors:
            observations = self._contexts.see(observations, first, places)
        chosen, inputs = given, None
        if given is None or self._has_state:
            states: Any = {}
            if self._has_state:
                states = self._begun(acting, observations, places, first)
                if keep:
                    # A copy, because a module may write into its inputs.
                    kept = tree_map(_own, states) if places is None else states  # [B, ...]
                    self.memory.set(_BEFORE, places, kept)
            # With given actions, the module only moves its state forward.
            if explore:
                if acting.draws and noise is None:
                    noise = self._next_noise(len(first_leaf(observations)), given is not None)
                made, its_inputs, states = acting.explore(observations, states, noise)
            else:
                made, its_inputs, states = acting.infer(observations, states)
            if self._has_state:
                self.memory.set(STATE, places, states)
            if given is None:
                chosen, inputs = made, its_inputs
        if self._contexts.connectors:
            self.memory.set(CHOSEN, places, chosen)
        # Rows at their own pace keep their inputs beyond this step, so they get a copy.
        if places is not None and inputs is not None:
            inputs = np.array(inputs, np.float32)
        sent = self.for_environments(chosen) if given is None else given
        return Acted(sent, chosen, inputs)

    def _begun(
        self, acting: TensorModule, observations: Any, places: RowIndices | None, first: Any
    ) -> Any:
        """Return states [B, ...] to act with, new ones where episodes begin."""
        if STATE not in self.memory.trees:
            return acting.initial_states(len(first_leaf(observations)))
        states = self.memory.get(STATE, places)
        if isinstance(first, Tensor) or (first is not None and first.any()):
            return acting.restarted(states, first)
        return states

    def _next_noise(self, count: int, unused: bool) -> Any:
        """Return noise [B, M] for actions, drawn for several steps at once."""
        assert self._distribution is not None
        if unused:
            return np.full((count, self._distribution.noise_size), 0.5, np.float32)
        begin, end = self._noise_used, self._noise_used + count
        if end > len(self._noise):
            drawn = self._distribution.draw_noise((max(count, self._ahead),), self._generator)
            self._noise = drawn.numpy() if self.device is None else drawn.to(self.device)  # [L, M]
            begin, end = 0, count
        self._noise_used = end
        return self._noise[begin:end]

    def for_environments(self, chosen: Any) -> Any:
        """Convert chosen actions [B, ...] to environments', which may keep them."""
        own = chosen.copy() if isinstance(chosen, np.ndarray) else tree_map(_own, chosen)
        return own if self.module_to_env.idle else self.module_to_env(own)

    def rewarded(self, rewards: Any, places: RowIndices | None = None) -> None:
        """Note rewards [B] of all rows' last actions, or of places."""
        if self._contexts.connectors:
            chosen = self.memory.get(CHOSEN, places)
            self._contexts.advance(chosen, in_dtype(rewards, np.float32), places)

    def follow(
        self, place: int, observations: Any, actions: Any, rewards: NDArray[Any], first: bool
    ) -> dict[str, Tree]:
        """Follow external steps; return states like `states_before`.

        Args:
            place: place of the row.
            observations: [L, ...] before each step, as in batches.
            actions: [L, ...] chosen there.
            rewards: [L]
            first: the first step begins an episode.
        """
        states: dict[str, Tree] = {}
        places = np.array([place])
        for t in range(len(rewards) if self.remembers else 0):
            now = slice(t, t + 1)
            begins = np.array([first and t == 0])
            self.act(take(observations, now), places, begins, given=take(actions, now))
            if t == 0:
                states = self.states_before(places)
            self.rewarded(rewards[now], places)
        return states

    # -- what batches hold -------------------------------------------------------------------------

    def states_before(self, places: RowIndices | None = None) -> dict[str, Any]:
        """Return the states [B, ...] before the last step, as in `EpisodeBatch.states`."""
        states: dict[str, Any] = {}
        if self._has_state:
            states[MODULE_STATE] = self.memory.get(_BEFORE, places)
        if self._contexts.connectors:
            states[CONNECTOR_STATES] = self._contexts.states(places)
        return states

    def log_probabilities(self, inputs: Any, actions: Any) -> NDArray[np.float32]:
        """Return log-probabilities [N, T] of actions, given inputs [N, T, D]."""
        assert self._distribution is not None, "the module returns no inputs of a distribution"
        with torch.no_grad():
            chosen = tree_map(_tensor, actions)  # [N, T, ...]
            logp = self._distribution(_tensor(inputs)).log_prob(chosen)  # [N, T]
            array: NDArray[np.float32] = logp.float().contiguous().cpu().numpy()
        return array

    def why_not_finite(self, inputs: Any) -> str:
        """Return why inputs [D] give non-finite log-probabilities; "": unknown."""
        if self._distribution is None:
            return ""
        return self._distribution.why_not_finite(_tensor(inputs).cpu())


class RandomActions(TensorModule):
    """Draws actions uniformly among the legal ones.

    Args:
        action_space: of an agent.
        seed: of the draws.

    Raises:
        UnsupportedSpace: no policy could act in this space.
    """

    draws, distribution, blank_inputs = False, None, np.zeros(0, np.float32)

    def __init__(self, action_space: Space[Any], seed: int = 0) -> None:
        self.observation_space = spaces.Dict()  # of which it reads only a mask
        self.action_space = deepcopy(action_space)  # a space has its own generator
        self._named, self._initial = {}, {}
        self._spec = distribution_for(action_space)
        self._generator = torch.Generator()
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seed the draws."""
        self.action_space.seed(noise_seed(seed) >> 31)  # spaces take 32 bits
        self._generator.manual_seed(noise_seed(seed))

    def draw(self, count: int, observations: Any) -> Tree:
        """Draw actions.

        Args:
            count: B.
            observations: [B, ...], which may have an action mask.

        Returns:
            The actions [B, ...], as a tree of the action space.
        """
        masks = observations.get(ACTION_MASK) if isinstance(observations, Mapping) else None
        if masks is None and not isinstance(self.action_space, _CHOICES):
            actions = zeros(self.action_space, (count,))  # [B, ...]
            for k in range(count):
                put(actions, k, to_tree(self.action_space, self.action_space.sample()))
            return actions
        logits = torch.zeros(count, self._spec.inputs_size)  # [B, D]
        if masks is not None:
            logits = self._spec.mask(logits, tree_map(torch.from_numpy, masks))  # [B, D]
        noise = self._spec.draw_noise((count,), self._generator)  # [B, M]
        drawn: Tree = tree_map(Tensor.numpy, self._spec(logits).sample(noise))  # [B, ...]
        return drawn

    def load(self, weights: Tree) -> None:
        """Load nothing."""

    def explore(self, observations: Any, states: Any, noise: Any = None) -> ActingStep:
        count = len(first_leaf(observations))
        return ActingStep(self.draw(count, observations), np.zeros((count, 0), np.float32), {})

    def infer(self, observations: Any, states: Any) -> ActingStep:
        return self.explore(observations, states)  # no action is better than any other


def random_actor(observation_space: Space[Any], action_space: Space[Any], seed: int = 0) -> Actor:
    """Return an actor that draws legal actions at random."""
    connectors = EnvToModule({}, {}, observation_space)
    return Actor(RandomActions(action_space), seed=seed, connectors=connectors)


def noise_seed(seed: int) -> int:
    """Return the seed of the noise that actions are sampled with."""
    sequence = np.random.SeedSequence(seed, spawn_key=(0,))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def _own(leaf: Any) -> Any:
    """Return an array or a tensor [...] with its own memory."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone()


def _tensor(leaf: Any) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else torch.from_numpy(leaf)
