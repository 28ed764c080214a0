"""Checks of a class that is to be an algorithm. No torch, unless the class has imported it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from inspect import formatannotation
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.config import LearnerConfig
from juggler.runtime.annotations import typed_by

_SCALARS = (bool, int, float, str, NoneType, Any)
_CONTAINERS = (Union, UnionType, list, tuple, dict)


def checked_algorithm(name: str, algorithm: Any) -> type[Algorithm]:
    """The class itself, if a run can train with it.

    Args:
        name: of the algorithm, for the error.
        algorithm: the class.

    Raises:
        ValueError: it is no algorithm, or its configuration or its core is incomplete; says what
            to write instead.
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
    """
    Raises:
        ValueError: a key has no type, a type that no file can hold, or no default of its type.
    """
    where = f"{where}: {config.__name__}"
    for name, value in _without_type(config):
        kind = type(value).__name__
        raise ValueError(
            f"{where} has {name} = {value!r} without a type, so it is no key: write "
            f"{name}: {kind} = {value!r}, or {name}: ClassVar[{kind}] = {value!r} if it is none"
        )
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
        if (default := _default(key)) is MISSING:
            raise ValueError(f"{where}: the key {key.name!r} of its config has no default")
        try:
            msgspec.convert(default, hints[key.name])
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{where} has a key {key.name!r} of type {kind} with the default {default!r}: "
                "give it a default of its type, or the type of its default"
            ) from error


def _without_type(config: type[LearnerConfig]) -> Iterator[tuple[str, Any]]:
    """Attributes that look like keys, and are none as dataclasses go by types alone."""
    for base in config.__mro__[: config.__mro__.index(LearnerConfig)]:
        typed = typed_by(base)
        for name, value in vars(base).items():
            is_key = not (name.startswith("_") or name.isupper() or hasattr(value, "__get__"))
            if is_key and name not in typed:
                yield name, value


def _can_be_written(hint: Any) -> bool:
    """Whether values of a type can be in a TOML file, and so in a run's config.toml."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _can_be_written(arguments[0])
    if origin is Literal or hint in (*_SCALARS, dict):
        return True
    return origin in _CONTAINERS and all(
        _can_be_written(each) for each in arguments if each is not Ellipsis
    )


def _default(key: Field[Any]) -> Any:
    return key.default if key.default_factory is MISSING else key.default_factory()


def _check_core(where: str, core: Any) -> None:
    """
    Raises:
        ValueError: it is no core, or a class that lacks a part of one.
    """
    if not isinstance(core, str) and not callable(core):
        raise ValueError(f"{where}: `core` must be a LearnerCore class, or its name, not {core!r}")
    if not isinstance(core, type):
        return
    # A class of a core has imported torch by itself.
    from juggler.learner.core.gradient_core import GradientCore

    if not issubclass(core, GradientCore):
        return
    if not hasattr(core, "name"):
        raise ValueError(
            f"{where}: {core.__name__} needs a name, which its checkpoints carry: write "
            f'name = "..." in the class'
        )
    for lacking in sorted(getattr(core, "__abstractmethods__", ())):
        raise ValueError(f"{where}: {core.__name__} needs a method {lacking!r}")
