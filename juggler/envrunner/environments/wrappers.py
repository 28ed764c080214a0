"""Puts configured wrappers around each environment, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator

from juggler.envrunner.environments.find_environment import Env, EnvironmentFactory
from juggler.runtime.near_matches import nearest


def wrapper_specs(pieces: Sequence[object]) -> tuple[WrapperSpec, ...]:
    """Parse a config's `env_wrappers`.

    Args:
        pieces: from the innermost wrapper to the outermost. Each is the name of a class in
            `gymnasium.wrappers`, "module:Class", or a table with that name under "use" and the
            wrapper's options.

    Raises:
        ValueError: a piece is something else.
    """
    return tuple(map(_spec, pieces))


def add_wrappers(
    source: EnvSpec | EnvironmentFactory, wrappers: tuple[WrapperSpec, ...]
) -> EnvSpec | EnvironmentFactory:
    """Put wrappers around each environment of a source."""
    if not wrappers:
        return source
    if isinstance(source, EnvSpec):
        added = (*source.additional_wrappers, *wrappers)
        return dataclasses.replace(source, additional_wrappers=added)
    return _WrappedFactory(source, wrappers)


class _WrappedFactory:
    def __init__(self, make: EnvironmentFactory, wrappers: tuple[WrapperSpec, ...]) -> None:
        self._make, self._wrappers = make, wrappers
        self.__qualname__ = getattr(make, "__qualname__", type(make).__name__)

    def __call__(self, **env_kwargs: Any) -> Env:
        env: Any = self._make(**env_kwargs)
        if not isinstance(env, gymnasium.Env):
            env.close()
            raise ValueError(
                f"env_wrappers and max_episode_steps are for single environments, and "
                f"{self.__qualname__} makes a {type(env).__name__}: let it wrap its own"
            )
        for wrapper in self._wrappers:
            env = load_env_creator(wrapper.entry_point)(env=env, **wrapper.kwargs or {})
        wrapped_env: Env = env
        return wrapped_env


def _spec(piece: object) -> WrapperSpec:
    options = dict(piece) if isinstance(piece, Mapping) else {"use": piece}
    use = options.pop("use", None)
    if not isinstance(use, str) or not use:
        raise ValueError(
            f"env_wrappers: a wrapper must be a name, or a table with a 'use', not {piece!r}"
        )
    if ":" not in use:
        if use not in gymnasium.wrappers.__all__:
            raise ValueError(
                f"env_wrappers: gymnasium.wrappers has no {use!r}"
                + nearest(
                    use,
                    gymnasium.wrappers.__all__,
                    own="your own must be named as 'package.module:Class'",
                )
            )
        use = f"gymnasium.wrappers:{use}"
    # Gymnasium's wrappers need tuples for shapes; TOML and command lines have only lists.
    arguments = {key: tuple(at) if isinstance(at, list) else at for key, at in options.items()}
    return WrapperSpec(use.rpartition(":")[2], use, arguments)
