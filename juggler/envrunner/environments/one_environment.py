"""One environment of a vector. No torch here: its process, if it has one, would import it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from juggler.envrunner.failures import EnvironmentFailed

Env = gymnasium.Env[Any, Any]


class EnvironmentFunction:
    """Makes one environment, here or in a process of its own: cloudpickle takes it there."""

    def __init__(
        self, make: Callable[..., Env], arguments: dict[str, Any], where: str, separate: bool
    ) -> None:
        self.make = make
        self.arguments = arguments
        self.where = where
        self.separate = separate
        self.ready: Env | None = None  # made already, for the first call

    def __call__(self) -> Env:
        env, self.ready = self.ready, None
        if env is None:
            try:
                env = self.make(**self.arguments)
            except Exception as error:
                raise EnvironmentFailed.during(self.where, "constructor", error) from None
        # Its own: vectors of environments write into it, and it may be the class's.
        env.metadata = dict(env.metadata)
        return _Reporting(env, self.where) if self.separate else env


class _Reporting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Says what raised, in an exception that can leave its environment's process."""

    def __init__(self, env: Env, where: str) -> None:
        super().__init__(env)
        self._where = where

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        try:
            return self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise EnvironmentFailed.during(self._where, "reset", error) from None

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            return self.env.step(action)
        except Exception as error:
            raise EnvironmentFailed.during(self._where, "step", error) from None
