"""From a module's name, class or factory and two spaces to a module."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from juggler.runtime.modules.models import MLPActorCritic
from juggler.runtime.modules.rl_module import RLModule

#: Makes a module of observation space, action space and model_config; an RLModule class is one.
ModuleFactory = Callable[
    [gymnasium.Space[Any], gymnasium.Space[Any], Mapping[str, Any]],
    RLModule,
]


def build_module(
    module: str | ModuleFactory | None,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    model_config: Mapping[str, Any],
) -> RLModule:
    """A new module with freshly drawn parameters.

    Args:
        module: "package.module:Class", imported here; an RLModule class or another callable of
            (observation_space, action_space, model_config); or None: the default model.
        observation_space: of one environment, not of a vector of them.
        action_space: the same.
        model_config: what the module makes of it; the default model takes `MLPConfig`'s fields.

    Raises:
        UnsupportedSpace: nothing serves one of the spaces yet.
        ValueError: the name leads nowhere, or model_config has a wrong key or value.
        TypeError: what the callable returned is not an RLModule.
    """
    if module is None:
        factory: ModuleFactory = MLPActorCritic
    elif isinstance(module, str):
        factory = _imported(module)
    else:
        factory = module
    built: object = factory(observation_space, action_space, model_config)
    if not isinstance(built, RLModule):
        raise TypeError(f"{module!r} made a {type(built).__name__}: it must make an RLModule")
    return built


def _imported(name: str) -> ModuleFactory:
    package, colon, attribute = name.partition(":")
    if not (package and colon and attribute):
        raise ValueError(f"module {name!r} must be named as 'package.module:Class'")
    try:
        found = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not (package + ".").startswith(error.name + "."):
            raise  # The package is there; something that it imports is not.
        raise ValueError(
            f"module {name!r} cannot be imported: there is no Python module {error.name!r} here; "
            "install it, or put its directory on PYTHONPATH, wherever this run has workers"
        ) from error
    factory = getattr(found, attribute, None)
    if factory is None:
        raise ValueError(f"module {name!r}: {package!r} is there and has no {attribute!r}")
    if not callable(factory):
        raise ValueError(
            f"module {name!r} is of type {type(factory).__name__}: it cannot be called"
        )
    made: ModuleFactory = factory
    return made
