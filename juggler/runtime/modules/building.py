"""Builds a module from its name, class or factory and two spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import Signature
from typing import Any

import gymnasium
import torch

from juggler.runtime.annotations import signature
from juggler.runtime.modules.by_name import found
from juggler.runtime.modules.catalog import Catalog
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.rl_module import RLModule

#: Makes a module, or a catalog of its parts, from observation space, action space and model_config.
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
    critic_space: gymnasium.Space[Any] | None = None,
    check_specs: bool = False,
) -> RLModule:
    """A new module with randomly initialized parameters.

    Args:
        module: "package.module:Class", imported here; an RLModule class, a Catalog class, or
            another callable of (observation_space, action_space, model_config); or None: the
            default module.
        observation_space: of one environment, not of a vector.
        action_space: likewise.
        model_config: the module's options; the default module takes the fields of `ModelConfig`.
        distribution: "package.module:function" or a callable of (action_space, **options) that
            makes a DistributionSpec; it is passed to the module in model_config. None: the one in
            model_config, if any.
        critic_space: of "critic_observations", which a value function sees in training beside
            observations; it is passed to the module in model_config. None: it sees observations
            alone, or the module only acts.
        check_specs: check inputs and outputs against the module's specs in every call.

    Raises:
        UnsupportedSpace: one of the spaces is not supported.
        ValueError: a name cannot be imported or is not of a module, model_config has a wrong key
            or value, or the module has no value function that could see more than observations.
        TypeError: the callable did not return an RLModule.
    """
    factory = found(module, "module") if isinstance(module, str) else module or ActorCritic
    _must_make_a_module(module, factory)
    if distribution is not None:
        model_config = {**model_config, "distribution": distribution}
    if critic_space is not None:
        model_config = {**model_config, "critic_space": critic_space}
    built = _called(factory, observation_space, action_space, model_config)
    if isinstance(built, Catalog):
        built = ActorCritic(observation_space, action_space, model_config, built)
    if not isinstance(built, RLModule):
        raise TypeError(f"{module!r} made a {type(built).__name__}: it must make an RLModule")
    if critic_space is not None and not (built.takes_critic_observations and built.critic_space):
        raise ValueError(
            f"critic_sees: the values of {type(built).__name__} come from observations alone; "
            "leave critic_sees out, or compute them from batch['critic_observations'] in "
            "_forward_train, set takes_critic_observations = True in the class, and pass it the "
            "model_config"
        )
    built.check_specs = check_specs
    return built


def _called(factory: Callable[..., object], *arguments: object) -> object:
    """
    Raises:
        ValueError: the factory takes other arguments, or its `__init__` does not call
            `super().__init__`.
    """
    name = getattr(factory, "__qualname__", type(factory).__name__)
    name += ".__init__" if isinstance(factory, type) else ""
    wrong, takes = "", "(observation_space, action_space, model_config)"
    with suppress(ValueError):  # Python does not know its signature
        known = signature(factory)
        if not _can_take(known, arguments):
            wrong = f"{name} must take {takes}: it takes {known}; see docs/modules.md"
    if wrong:
        raise ValueError(wrong)
    try:
        return factory(*arguments)
    except AttributeError as error:
        if "before Module.__init__() call" not in str(error):
            raise
        raise ValueError(f"{name} must begin with super().__init__{takes}: {error}") from error


def _can_take(known: Signature, arguments: Sequence[object]) -> bool:
    try:
        known.bind(*arguments)
    except TypeError:
        return False
    return True


def _must_make_a_module(module: object, factory: object) -> None:
    """Refuse what would only raise a TypeError when it is called.

    Raises:
        ValueError: a class of something else, or a torch module that is built already.
    """
    if isinstance(factory, type) and not issubclass(factory, (RLModule, Catalog)):
        raise ValueError(
            f"module {module!r}: the class {factory.__name__} derives from neither "
            "juggler.RLModule nor juggler.Catalog; docs/modules.md shows how to write a module"
        )
    if isinstance(factory, torch.nn.Module):
        raise ValueError(
            f"module: this {type(factory).__name__} is built already, and each worker builds its "
            "own: give a class that derives from juggler.RLModule, or a function of "
            "(observation_space, action_space, model_config) that returns such a module"
        )
