"""From a module's name, class or factory and two spaces to a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from juggler.runtime.modules.by_name import found
from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.rl_module import RLModule

#: Makes a module, or a catalog of its parts, of observation space, action space and model_config.
#: RLModule and Catalog classes are such factories, and so is an `RLModuleSpec`.
ModuleFactory = Callable[
    [gymnasium.Space[Any], gymnasium.Space[Any], Mapping[str, Any]],
    RLModule | Catalog,
]


def build_module(
    module: str | ModuleFactory | None,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    model_config: Mapping[str, Any],
    *,
    distribution: str | Callable[..., Any] | None = None,
    check_specs: bool = False,
) -> RLModule:
    """A new module with freshly drawn parameters.

    Args:
        module: "package.module:Class", imported here; an RLModule class, a Catalog class, or
            another callable of (observation_space, action_space, model_config); or None: the
            default module.
        observation_space: of one environment, not of a vector of them.
        action_space: the same.
        model_config: what the module makes of it; the default one takes `ModelConfig`'s fields.
        distribution: "package.module:function" or a callable of (action_space, **options) that
            makes a DistributionSpec; the module gets it in its model_config. None: what that says.
        check_specs: compare inputs and outputs with the module's specs in every call.

    Raises:
        UnsupportedSpace: nothing serves one of the spaces.
        ValueError: a name leads nowhere, or model_config has a wrong key or value.
        TypeError: what the callable returned is not an RLModule.
    """
    factory = found(module, "module") if isinstance(module, str) else module or ActorCritic
    if distribution is not None:
        model_config = {**model_config, "distribution": distribution}
    built: object = factory(observation_space, action_space, model_config)
    if isinstance(built, Catalog):
        built = ActorCritic(observation_space, action_space, model_config, built)
    if not isinstance(built, RLModule):
        raise TypeError(f"{module!r} made a {type(built).__name__}: it must make an RLModule")
    built.check_specs = check_specs
    return built
