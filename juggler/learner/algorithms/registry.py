"""Algorithms by name, built-in and user-defined. Imports torch lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from importlib import import_module
from inspect import formatannotation
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import gymnasium
import msgspec

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.config import ImitationConfig, IntrinsicConfig, LearnerConfig
from juggler.runtime.annotations import typed_by
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.modules.import_by_name import NamedClasses, found
from juggler.runtime.near_matches import nearest, one_of
from juggler.runtime.other_libraries import algorithm_here

if TYPE_CHECKING:
    from juggler.learner.core.learner_core import LearnerCore
    from juggler.learner.learner import Learner

_SCALARS = (bool, int, float, str, NoneType, Any)
_CONTAINERS = (Union, UnionType, list, tuple, dict)


def checked_algorithm(name: str, algorithm: Any) -> type[Algorithm]:
    """Return the class, if a run can train with it.

    Args:
        name: its name, for the error.
        algorithm: the class.

    Raises:
        ValueError: it is not an algorithm, or its configuration or its core is incomplete. The
            message explains what to write instead.
    """
    where = f"algorithm {name!r}"
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise ValueError(
            f"{where} must be a class derived from juggler.Algorithm, not {algorithm!r}"
        )
    config = getattr(algorithm, "config", None)
    if not (
        isinstance(config, type)
        and issubclass(config, LearnerConfig)
        # Without the decorator, a derived class has no keys of its own.
        and "__dataclass_fields__" in vars(config)
    ):
        raise ValueError(
            f"{where}: config = {config!r} must be a class derived from juggler.LearnerConfig, "
            "with @dataclass(kw_only=True) above it"
        )
    _check_keys(where, config)
    _check_core(where, getattr(algorithm, "core", None))
    return algorithm


def _check_keys(where: str, config: type[LearnerConfig]) -> None:
    """Raise ValueError if a key's type or default is unusable."""
    where = f"{where}: {config.__name__}"
    for name, value in _without_type(config):
        kind = type(value).__name__
        raise ValueError(
            f"{where} has {name} = {value!r} without a type, so it is no key: write "
            f"{name}: {kind} = {value!r}, or {name}: ClassVar[{kind}] = {value!r} if it is none"
        )
    # Annotations may name types that only a type checker imports.
    try:
        hints = get_type_hints(config)
    except (NameError, TypeError) as error:
        raise ValueError(f"{where} has a key whose type cannot be read: {error}") from error
    for key in fields(config):
        kind = key.type if isinstance(key.type, str) else formatannotation(key.type)
        if not _can_be_written(hints[key.name]):
            raise ValueError(
                f"{where} has a key {key.name!r} of type {kind}, which neither a file nor an "
                "option can give: use bool, int, float, str, a Literal, or a list, tuple or dict "
                "of these; a name as a str can stand for anything else"
            )
        # A run need not give this key a value.
        default = key.default if key.default_factory is MISSING else key.default_factory()
        if default is MISSING:
            raise ValueError(f"{where}: the key {key.name!r} of its config has no default")
        try:
            msgspec.convert(default, hints[key.name])
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{where} has a key {key.name!r} of type {kind} with the default {default!r}: "
                "give it a default of its type, or the type of its default"
            ) from error


def _without_type(config: type[LearnerConfig]) -> Iterator[tuple[str, Any]]:
    """Yield unannotated attributes, which dataclasses ignore."""
    for base in config.__mro__[: config.__mro__.index(LearnerConfig)]:
        typed = typed_by(base)
        for name, value in vars(base).items():
            is_key = not (name.startswith("_") or name.isupper() or hasattr(value, "__get__"))
            if is_key and name not in typed:
                yield name, value


def _can_be_written(hint: Any) -> bool:
    """Return whether config.toml can hold values of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _can_be_written(arguments[0])
    if origin is Literal or hint in (*_SCALARS, dict):
        return True
    return origin in _CONTAINERS and all(
        _can_be_written(each) for each in arguments if each is not Ellipsis
    )


def _check_core(where: str, core: Any) -> None:
    """Raise ValueError if a core is incomplete or of another type."""
    if not isinstance(core, str) and not callable(core):
        raise ValueError(f"{where}: `core` must be a LearnerCore class, or its name, not {core!r}")
    if not isinstance(core, type):
        return
    # The file of a core class has already imported torch.
    from juggler.learner.core.gradient_core import GradientCore

    if not issubclass(core, GradientCore):
        return
    if not hasattr(core, "name"):
        raise ValueError(
            f"{where}: {core.__name__} needs a name, which its checkpoints carry: write "
            f'name = "..." in the class'
        )
    for missing in sorted(getattr(core, "__abstractmethods__", ())):
        raise ValueError(f"{where}: {core.__name__} needs a method {missing!r}")


def _shipped(name: str) -> type[Algorithm]:
    """Import the class of a built-in algorithm, and name its core."""
    folder, class_name = f"juggler.learner.algorithms.{name}", name.capitalize()
    found: type[Algorithm] = getattr(import_module(folder), f"{class_name}Algorithm")
    found.core = f"{folder}.core:{class_name}"
    return found


#: Built-in algorithms.
ALGORITHMS: dict[str, type[Algorithm]] = {
    name: _shipped(name)
    for name in ("appo", "bc", "dqn", "impala", "iql", "ppo", "pqn", "r2d2", "sac", "td3")
}

_classes = NamedClasses("algorithm", ALGORITHMS, checked_algorithm, "algorithm={}", algorithm_here)
find_algorithm = _classes.find
register_algorithm = _classes.register


def algorithms_with(key: str) -> list[str]:
    """Return names of built-in algorithms whose config has this key."""
    return [
        name
        for name, algorithm in ALGORITHMS.items()
        if key in (field.name for field in fields(algorithm.config))
    ]


def build_learner(
    config: LearnerConfig | Mapping[str, Any],
    module: str | Callable[..., Any] | None,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    model_config: Mapping[str, Any],
    *,
    distribution: str | Callable[..., Any] | None = None,
    critic_space: gymnasium.Space[Any] | None = None,
    check_specs: bool = False,
    connectors: ConnectorsConfig | Mapping[str, Any] | None = None,
    own_connectors: Mapping[str, type[Any]] | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Learner:
    """Build the learner of a single-agent run.

    Args:
        config: an algorithm's config, or its fields by name. The field `algorithm` names the
            algorithm; the default is impala.
        module: see `build_module`; none: the algorithm's module.
        observation_space: space of the observations in episodes.
        action_space: space of the actions in episodes.
        model_config: the module's configuration.
        distribution: see `build_module`.
        critic_space: see `build_module`.
        check_specs: see `build_module`.
        connectors: a run's table `connectors`; none: the module gets rows unchanged.
        own_connectors: classes of a script by their names: connectors, and the algorithm.
        device: the device to compute on.
        seed: seed of the initial parameters.

    Raises:
        ValueError: a hyper-parameter, the module, a connector or a space is invalid.
    """
    from juggler.learner.learner import Learner
    from juggler.runtime.connectors.pipelines import build_learner_pipeline
    from juggler.runtime.modules.module_specs import build_module

    algorithm, config = _parsed(config, action_space, own_connectors or {})
    core = algorithm.core
    make_core = found(core, "core") if isinstance(core, str) else core
    if not isinstance(connectors, ConnectorsConfig):
        connectors = ConnectorsConfig.parse(connectors or {})
    pipeline = build_learner_pipeline(connectors, observation_space, action_space, own_connectors)
    # The module sees what the pipeline makes of observations.
    make_module = partial(
        build_module,
        module or algorithm.module,
        pipeline.observation_space,
        action_space,
        model_config,
        distribution=distribution,
        critic_space=critic_space,
        check_specs=check_specs,
    )
    made = make_core(make_module, replace(config, intrinsic={}, imitation={}))
    return Learner(_with_rewards(made, config), seed=seed, device=device, pipeline=pipeline)


def _parsed(
    config: LearnerConfig | Mapping[str, Any],
    action_space: gymnasium.Space[Any],
    own: Mapping[str, type[Any]],
) -> tuple[type[Algorithm], LearnerConfig]:
    """Return the algorithm that a config names, and the config.

    Raises:
        ValueError: the algorithm cannot act in this space, or a key is unknown.
    """
    if not isinstance(config, LearnerConfig | Mapping):
        raise ValueError(f"config = {config!r}: give a table, such as {{'algorithm': 'impala'}}")
    named = config.get("algorithm") if isinstance(config, Mapping) else config.algorithm
    name = named or LearnerConfig.algorithm
    algorithm = own.get(name) or find_algorithm(name)
    must_act_in(name, algorithm, action_space)
    if isinstance(config, LearnerConfig):
        return algorithm, config
    known = [each.name for each in fields(algorithm.config)]
    for key in config:
        if key not in known:
            raise ValueError(f"{key!r} is no key of {name!r}{nearest(key, known)}")
    return algorithm, algorithm.config(**config)


def _with_rewards(core: Any, config: LearnerConfig) -> LearnerCore[Any]:
    """Wrap a core in the configured imitation or intrinsic rewards."""
    if config.intrinsic:
        from juggler.learner.algorithms.intrinsic.rnd import Rnd

        return Rnd(core, IntrinsicConfig.parse(config.intrinsic))
    if config.imitation:
        from juggler.learner.algorithms.imitation.discriminator import Discriminator

        return Discriminator(core, ImitationConfig.parse(config.imitation))
    made: LearnerCore[Any] = core
    return made


def must_act_in(name: str, algorithm: type[Algorithm], action_space: gymnasium.Space[Any]) -> None:
    """Raise ValueError if the algorithm does not support the action space.

    The error names the algorithms that do.
    """
    if _acts_in(algorithm, action_space):
        return
    needed = one_of(space.__name__ for space in algorithm.action_spaces)
    others = [
        key
        for key, each in ALGORITHMS.items()
        if each.offline == algorithm.offline and _acts_in(each, action_space)
    ]
    raise ValueError(
        f"algorithm {name!r} needs a {needed} action space, and this environment has "
        f"{action_space}: choose an algorithm that can act in it, such as {one_of(others)}"
    )


def _acts_in(algorithm: type[Algorithm], action_space: gymnasium.Space[Any]) -> bool:
    return not algorithm.action_spaces or isinstance(action_space, algorithm.action_spaces)
