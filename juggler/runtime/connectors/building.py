"""Builds pipelines of connectors from a configuration and two spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from juggler.runtime.annotations import signature
from juggler.runtime.connectors.built_in import Place
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.connector import (
    ActionConnector,
    Connector,
    ContextConnector,
    LearnerConnector,
    ObservationConnector,
    Space,
)
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.learner_pipeline import LearnerPipeline
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.connectors.pipeline import Piece, check_options, class_path
from juggler.runtime.modules.by_name import found
from juggler.runtime.wire.errors import UnsupportedSpace

C = TypeVar("C", bound=Connector)
#: Connector classes of a script or notebook, which cannot be imported, by the names that stand for
#: them in a configuration.
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
    """The two pipelines of an EnvRunner, for the spaces of its environment.

    Raises:
        ValueError: as the two functions below.
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
    """An EnvRunner's pipeline from the policy's actions to the environment's.

    Args:
        config: of the run.
        observation_space: the environment's.
        action_space: the environment's; the policy's is the pipeline's `action_space`.
        own: classes that cannot be imported by name.

    Raises:
        ValueError: a piece cannot be built; names it.
    """
    connectors: list[ActionConnector] = []
    wanted = action_space
    # Each connector passes its result to the next one, the last one to the environment.
    for piece in reversed(list(config.pipeline("module_to_env"))):
        cls = _class_of(piece, "module_to_env", own)
        try:
            connector = _built(piece, cls, observation_space, wanted)
        except UnsupportedSpace as error:
            raise UnsupportedSpace(f"action space: {error}") from error
        assert isinstance(connector, ActionConnector)
        wanted = connector.action_space
        connectors.insert(0, connector)
    return ModuleToEnv(connectors, wanted, action_space)


def build_env_to_module(
    config: ConnectorsConfig,
    observation_space: Space,
    action_space: Space,
    own: OwnClasses | None = None,
) -> EnvToModule:
    """An EnvRunner's pipeline from the environment's observations to the module's.

    Args:
        config: of the run.
        observation_space: the environment's.
        action_space: the policy's.
        own: classes that cannot be imported by name.

    Raises:
        ValueError: a piece cannot be built, or stands after one that adds context; names it.
    """
    stored: dict[str, ObservationConnector] = {}
    contexts: dict[str, ContextConnector] = {}
    space = observation_space
    for piece in config.pipeline("env_to_module"):
        cls = _class_of(piece, "env_to_module", own)
        connector = _built(piece, cls, space, action_space)
        space = connector.observation_space
        if isinstance(connector, ContextConnector):
            contexts[piece.name] = connector
        elif contexts:
            raise ValueError(
                f"connectors.env_to_module: {piece.name!r} stands after {next(iter(contexts))!r}, "
                "which adds context to observations: put it before that one, because batches hold "
                "observations without their context"
            )
        else:
            assert isinstance(connector, ObservationConnector)
            stored[piece.name] = connector
    return EnvToModule(stored, contexts, observation_space)


def build_learner_pipeline(
    config: ConnectorsConfig,
    observation_space: Space,
    action_space: Space,
    own: OwnClasses | None = None,
) -> LearnerPipeline:
    """A learner's pipeline over the batches of one module.

    Args:
        config: of the run.
        observation_space: of the observations in batches.
        action_space: the policy's.
        own: classes that cannot be imported by name.

    Raises:
        ValueError: a piece cannot be built; names it.
    """
    contexts: dict[str, ContextConnector] = {}
    space = observation_space
    for piece in config.pipeline("env_to_module"):
        cls = _class_of(piece, "env_to_module", own)
        if issubclass(cls, ContextConnector):  # the others ran in the EnvRunner
            context = _built(piece, cls, space, action_space)
            contexts[piece.name], space = context, context.observation_space
    connectors: dict[str, LearnerConnector] = {}
    for piece in config.pipeline("learner"):
        connector = _built(piece, _class_of(piece, "learner", own), space, action_space)
        assert isinstance(connector, LearnerConnector)
        connectors[piece.name] = connector
    return LearnerPipeline(contexts, connectors, observation_space)


def _class_of(piece: Piece, place: Place, own: OwnClasses | None) -> type[Connector]:
    """The class of a piece.

    Raises:
        ValueError: the piece's name cannot be imported, or is not of a kind for this pipeline.
    """
    cls: object = (own or {}).get(piece.path) or found(piece.path, "connector")
    kinds = _KINDS[place]
    if not (isinstance(cls, type) and issubclass(cls, kinds)):
        name = class_path(cls) if isinstance(cls, type) else repr(cls)
        raise ValueError(
            f"connectors.{place}: {name} is not a subclass of "
            f"{' or '.join(kind.__name__ for kind in kinds)}"
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
        raise  # the environment's space is at fault, not the connector
    except ValueError as error:
        raise ValueError(f"connector {piece.name!r}: {error}") from error
    missing = [name for name in ("observation_space", "action_space") if not hasattr(built, name)]
    if missing:
        raise ValueError(
            f"connector {piece.name!r} has no {missing[0]}: its __init__ must call that of "
            "Connector with the spaces that it hands on"
        )
    return built
