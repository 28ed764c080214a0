"""The pipelines between environment, module and learner, and building them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from juggler.runtime.annotations import signature
from juggler.runtime.connectors.config import (
    ConnectorsConfig,
    Piece,
    Place,
    check_options,
    class_path,
)
from juggler.runtime.connectors.connector import (
    ActionConnector,
    Columns,
    Connector,
    ContextConnector,
    LearnerConnector,
    MergeableConnector,
    ObservationConnector,
    Space,
)
from juggler.runtime.connectors.contexts import FRAMES, FrameStack
from juggler.runtime.connectors.leaves import LeafFunctions, acted_dtype, in_dtype
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.import_by_name import found
from juggler.runtime.near_matches import difference, one_of
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.structures import from_tree, space_leaves, tree_map, zeros
from juggler.runtime.wire.trees import Tree


class EnvToModule:
    """Observation connectors, and the context connectors after them.

    Attributes:
        observation_space: of the observations in batches.
        stored: connectors that make the observations in batches, in order.
        module_observation_space: of the module's observations.
        learns: whether a connector learns from watched observations.
        rewrites: whether batches hold anything other than the environment's own observations.
        contexts: context connectors by name, in order.
    """

    def __init__(
        self,
        stored: Mapping[str, ObservationConnector],
        contexts: Mapping[str, ContextConnector],
        observation_space: Space,
    ) -> None:
        self._stored = dict(stored)
        self.stored = list(stored.values())
        self._mergeable = {
            name: each for name, each in stored.items() if isinstance(each, MergeableConnector)
        }
        self.contexts = dict(contexts)
        self.learns = bool(self._mergeable)
        self.rewrites = bool(stored)
        self.observation_space = self.stored[-1].observation_space if stored else observation_space
        self.module_observation_space = self.observation_space
        for context in contexts.values():
            self.module_observation_space = context.observation_space

    def acting_part(self) -> EnvToModule:
        """Return the connectors without contexts that only learners use."""
        contexts = {name: each for name, each in self.contexts.items() if each.for_acting}
        return EnvToModule(self._stored, contexts, self.observation_space)

    def numbers(self) -> dict[str, NDArray[Any]]:
        """Return the changing numbers by name, which `with_numbers` needs.

        Raises:
            NotImplementedError: a connector cannot be exported.
        """
        return {
            f"numbers_{place}_{name}": array
            for place, each in enumerate(self.stored)
            if isinstance(each, MergeableConnector)
            for name, array in each.numbers().items()
        }

    def with_numbers(self, observations: Any, numbers: Mapping[str, Any]) -> Any:
        """Convert tensors [B, ...], with the connectors' numbers as tensors."""
        for place, each in enumerate(self.stored):
            if isinstance(each, MergeableConnector):
                start = f"numbers_{place}_"
                own = {n.removeprefix(start): x for n, x in numbers.items() if n.startswith(start)}
                observations = each.with_numbers(observations, own)
            else:
                observations = each(observations)
        return observations

    def __call__(self, observations: Any) -> Any:
        """Convert the environment's observations [B, ...] to those in batches."""
        for connector in self.stored:
            observations = connector(observations)
        return observations

    def watch(self, observations: Any) -> Any:
        """Apply to one step [N, ...], from which connectors also learn."""
        for connector in self.stored:
            if isinstance(connector, MergeableConnector):
                connector.watch(observations)
            observations = connector(observations)
        return observations

    def take_delta(self, live: NDArray[np.bool_]) -> State:
        """Return what connectors learned from the watched fragment; {}: nothing.

        Args:
            live: [N, T]

        Raises:
            NonFiniteObservation: an observation has NaN or infinity.
        """
        return {name: each.take_delta(live) for name, each in self._mergeable.items()}

    def forget(self) -> None:
        """Forget the watched fragment, because it is lost."""
        for connector in self._mergeable.values():
            connector.forget()

    def set_state(self, state: State) -> None:
        """Set the state that all EnvRunners have learned together.

        Raises:
            ValueError: the state belongs to other connectors.
        """
        if state.keys() != self._mergeable.keys():
            odd = difference(state, self._mergeable)
            raise ValueError(f"this state is of other connectors, {odd}: use the run's own ones")
        for name, connector in self._mergeable.items():
            connector.set_state(state[name])


def is_shipped(connector: Connector) -> bool:
    """Return whether a connector is one of Juggler's own."""
    return type(connector).__module__.startswith("juggler.")


def _must_have_steps(connector: Connector, columns: Columns) -> None:
    """Raise ValueError unless columns of steps have the shape [N, T]."""
    for name in (c.REWARDS, c.TERMINATED, c.TRUNCATED) if c.LIVE in columns else ():
        if name in columns and columns[name].shape != columns[c.LIVE].shape:
            has, steps = list(columns[name].shape), list(columns[c.LIVE].shape)
            raise ValueError(
                f"connector {type(connector).__name__} gives column {name!r} the shape {has}, and "
                f"`live` has {steps}: a learner needs a number for each step"
            )


class ModuleToEnv:
    """Applies action connectors, then converts to the environment's dtypes.

    Args:
        connectors: the pieces; pieces with nothing to do are left out.
        action_space: the space in which the policy acts.
        env_action_space: the environment's space.

    Attributes:
        action_space: the space in which the policy acts.
        idle: whether the environment gets actions unchanged.
        connectors: the pieces that have something to do.
    """

    def __init__(
        self, connectors: Sequence[ActionConnector], action_space: Space, env_action_space: Space
    ) -> None:
        self.action_space = action_space
        self.connectors = [connector for connector in connectors if not connector.idle]
        self._env_action_space = env_action_space
        self._one_array = not isinstance(env_action_space, spaces.Dict | spaces.Tuple)
        self._casts = LeafFunctions(
            {
                path: partial(in_dtype, dtype=leaf.dtype)
                for path, leaf in space_leaves(env_action_space)
                if leaf.dtype != acted_dtype(leaf)
            }
        )
        # For data sets, which hold the environment's actions.
        self._acted = LeafFunctions(
            {
                path: partial(in_dtype, dtype=acted_dtype(leaf))
                for path, leaf in space_leaves(action_space)
            }
        )
        self.idle = self._one_array and not self.connectors and not self._casts.functions

    def __call__(self, actions: Any) -> Any:
        """Convert a tree of actions [N, ...] to the environment's."""
        for connector in self.connectors:
            actions = connector(actions)
        if self._casts.functions:
            actions = self._casts(actions)
        return actions if self._one_array else from_tree(self._env_action_space, actions)

    def undo(self, actions: Any) -> Any:
        """Convert a tree of the environment's actions [N, ...] to the policy's.

        Raises:
            NotImplementedError: a connector cannot be undone; names it.
        """
        for connector in reversed(self.connectors):
            actions = connector.undo(actions)
        return self._acted(actions)


class LearnerPipeline:
    """The learner's half of context connectors, followed by learner connectors.

    Attributes:
        stored_space: of the observations in batches.
        observation_space: of the module's observations.
        contexts: context connectors by name, in order.
        frames_once: whether batches have each frame once, for a source of data that stores them;
            `stacked` then makes the stacks for the module.
    """

    def __init__(
        self,
        contexts: Mapping[str, ContextConnector],
        connectors: Mapping[str, LearnerConnector],
        observation_space: Space,
    ) -> None:
        self.contexts = dict(contexts)
        self._connectors = dict(connectors)
        self.stored_space = observation_space
        self.observation_space = observation_space
        for context in contexts.values():
            self.observation_space = context.observation_space
        # Frames may be numbered if nothing else changes observations.
        acting = [context for context in contexts.values() if context.for_acting]
        only = len(acting) == 1 and not any(x.uses_observations for x in connectors.values())
        first = acting[0] if only else None
        self._stack = first if type(first) is FrameStack else None
        self.frames_once = False
        self._rows_stay = False

    def keep_frames_once(self, *, rows_stay: bool = False) -> None:
        """Let batches hold each frame once, if frames are only stacked.

        Args:
            rows_stay: whether the source of data returns whole rows unchanged. If so, batches come
                out without stacks; otherwise in the form of `FrameStack.numbered`.
        """
        self.frames_once, self._rows_stay = self._stack is not None, rows_stay

    def leaves_stacks_out(self, columns: Mapping[str, Any]) -> bool:
        """Return whether columns of this pipeline still need `stacked`.

        Columns from elsewhere may have whole stacks.
        """
        if self._stack is None or not self.frames_once:
            return False
        return self._stack.is_without(columns) if self._rows_stay else FRAMES in columns

    def stacked(self, columns: Columns) -> Columns:
        """Make the module's columns from a source's columns.

        The source returns rows unchanged, or frames [..., k, ...].
        """
        if self._stack is None or not self.frames_once:
            return columns
        if not self._rows_stay:
            return self._stack.stacked(columns)
        return self._stack.over_rows(columns, self._context(columns, self._stack))

    def __call__(self, columns: Columns) -> Columns:
        """Make new columns from a batch on its device."""
        columns = self.in_context(columns)
        for connector in self._connectors.values():
            columns = connector(columns)
            if not is_shipped(connector):
                _must_have_steps(connector, columns)
        return columns

    def in_context(self, columns: Columns) -> Columns:
        """Apply only the context connectors."""
        for context in self.contexts.values():
            state = self._context(columns, context)
            if not self.frames_once or context is not self._stack:
                columns = context.over_rows(columns, state)
            elif not self._rows_stay:
                columns = self._stack.numbered(columns, state)
        return columns

    def _context(self, columns: Columns, of: ContextConnector) -> Any:
        """Return a connector's context at the start of each row [N, ...]."""
        (name,) = (name for name, each in self.contexts.items() if each is of)
        return columns[c.STATES][c.CONNECTOR_STATES][name]

    def add_up_with(self, sums: Callable[[Tensor], Tensor]) -> None:
        """Set how to sum over a learner group; see `LearnerConnector.sums`."""
        for connector in self._connectors.values():
            connector.sums = sums

    def example_contexts(self) -> dict[str, Tree]:
        """Return example contexts [...] of one row, by name.

        They show the shapes and dtypes that batches must have.
        """
        examples: dict[str, Tree] = {}
        space = self.stored_space
        for name, connector in self.contexts.items():
            context = connector.initial(zeros(space, (1,)))  # [1, ...]
            examples[name] = tree_map(lambda array: array[0, ...], context)  # [...]
            space = connector.observation_space
        return examples

    def get_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the states of the connectors that have one, by name."""
        states = {name: connector.get_state() for name, connector in self._connectors.items()}
        return {name: state for name, state in states.items() if state}

    def set_state(self, states: Mapping[str, Any]) -> None:
        """Continue from these states.

        Raises:
            ValueError: the states belong to other connectors.
        """
        if states.keys() != (own := self.get_state()).keys():
            raise ValueError(f"states of other connectors, {difference(states, own)}")
        for name, state in states.items():
            self._connectors[name].set_state(state)


C = TypeVar("C", bound=Connector)
#: Connector classes of a script or notebook, which cannot be imported, by their names in a
#: configuration.
OwnClasses = Mapping[str, type[Any]]

_KINDS: dict[Place, tuple[type[Connector], ...]] = {
    "env_to_module": (ObservationConnector, ContextConnector),
    "module_to_env": (ActionConnector,),
    "learner": (LearnerConnector,),
}


def build_runner_pipelines(
    config: ConnectorsConfig,
    observation_space: Space,
    action_space: Space,
    own: OwnClasses | None = None,
) -> tuple[EnvToModule, ModuleToEnv]:
    """Build both pipelines of an EnvRunner for its spaces.

    Args:
        config: of the run.
        observation_space: the environment's.
        action_space: the environment's; the policy's is the second pipeline's `action_space`.
        own: classes that cannot be imported by name.

    Raises:
        ValueError: a piece cannot be built, or follows a piece that adds context; names it.
    """
    module_to_env = build_module_to_env(config, observation_space, action_space, own)
    env_to_module = build_env_to_module(config, observation_space, module_to_env.action_space, own)
    return env_to_module, module_to_env


def build_module_to_env(
    config: ConnectorsConfig,
    observation_space: Space,
    action_space: Space,
    own: OwnClasses | None = None,
) -> ModuleToEnv:
    """Build the pipeline from module to environment."""
    connectors: list[ActionConnector] = []
    wanted = action_space
    # Each connector passes its result to the next one, the last one to the environment.
    for piece in reversed(config.pipeline("module_to_env")):
        cls: type[ActionConnector] = _class_of(piece, "module_to_env", own)
        try:
            connector = _built(piece, cls, observation_space, wanted)
        except UnsupportedSpace as error:
            raise UnsupportedSpace(f"action space: {error}") from error
        wanted = connector.action_space
        connectors.insert(0, connector)
    return ModuleToEnv(connectors, wanted, action_space)


def build_env_to_module(
    config: ConnectorsConfig,
    observation_space: Space,
    action_space: Space,
    own: OwnClasses | None = None,
) -> EnvToModule:
    """Build the pipeline from environment to module, for the policy's action space."""
    stored: dict[str, ObservationConnector] = {}
    contexts: dict[str, ContextConnector] = {}
    space = observation_space
    for piece in config.pipeline("env_to_module"):
        cls: type[Any] = _class_of(piece, "env_to_module", own)
        connector = _built(piece, cls, space, action_space)
        space = connector.observation_space
        # Batches hold observations without context, so nothing may follow these.
        if isinstance(connector, ContextConnector):
            contexts[piece.name] = connector
        elif contexts:
            raise ValueError(
                f"connectors.env_to_module: {piece.name!r} follows {next(iter(contexts))!r}, "
                "which adds context to observations: put it earlier, because batches hold "
                "observations without their context"
            )
        else:
            stored[piece.name] = connector
    return EnvToModule(stored, contexts, observation_space)


def build_learner_pipeline(
    config: ConnectorsConfig,
    observation_space: Space,
    action_space: Space,
    own: OwnClasses | None = None,
) -> LearnerPipeline:
    """Build a learner's pipeline over the batches of one module.

    The spaces are the observations in batches, and the policy's actions.

    Raises:
        ValueError: a piece cannot be built; names it.
    """
    contexts: dict[str, ContextConnector] = {}
    space = observation_space
    for piece in config.pipeline("env_to_module"):
        cls: type[Any] = _class_of(piece, "env_to_module", own)
        if issubclass(cls, ContextConnector):  # other kinds ran in the EnvRunner
            contexts[piece.name] = _built(piece, cls, space, action_space)
            space = contexts[piece.name].observation_space
    connectors: dict[str, LearnerConnector] = {
        piece.name: _built(piece, _class_of(piece, "learner", own), space, action_space)
        for piece in config.pipeline("learner")
    }
    return LearnerPipeline(contexts, connectors, observation_space)


def _class_of(piece: Piece, place: Place, own: OwnClasses | None) -> type[Any]:
    """Find the class of a piece.

    Raises:
        ValueError: the piece's name cannot be imported, or is of a kind for another pipeline.
    """
    cls: object = (own or {}).get(piece.path) or found(piece.path, "connector")
    kinds = _KINDS[place]
    if not (isinstance(cls, type) and issubclass(cls, kinds)):
        name = class_path(cls) if isinstance(cls, type) else repr(cls)
        raise ValueError(
            f"connectors.{place}: {name} is not a subclass of "
            f"{one_of(kind.__name__ for kind in kinds)}"
        )
    return cls


def _built(piece: Piece, cls: type[C], observation_space: Space, action_space: Space) -> C:
    parameters = signature(cls).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    options = [parameter.name for parameter in parameters][2:]
    if not takes_all:
        check_options(piece.name, piece.options, options)
    try:
        built = cls(observation_space, action_space, **piece.options)
    except UnsupportedSpace:
        raise  # the environment's space is unsupported, not the connector
    except ValueError as error:
        raise ValueError(f"connector {piece.name!r}: {error}") from error
    # A user's class may not call `super().__init__`.
    missing = [name for name in ("observation_space", "action_space") if not hasattr(built, name)]
    if missing:
        raise ValueError(
            f"connector {piece.name!r} has no {missing[0]}: its __init__ must call "
            "Connector.__init__ with the spaces that it passes on"
        )
    return built
