"""Reads attributes of environments within PettingZoo's wrappers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def reader(env: Any, name: str) -> Callable[[], Any]:
    """A fast `getattr(env, name)` for an environment that has been reset.

    PettingZoo's wrappers hand a lookup from one to the next, which takes longer than some moves.
    Wrappers that would only hand it on are passed over, for as long as they have no value of their
    own by this name. What a wrapper does in another way is done as always: a property, or a
    `__getattr__` of its own.

    Args:
        env: an environment, which may be a wrapper. What wrappers wrap must stay the same.
        name: of an attribute.
    """
    wrappers = sys.modules.get("pettingzoo.utils.wrappers")
    passed: list[dict[str, Any]] = []  # what the wrappers have themselves
    while wrappers is not None and _only_hands_on(env, name, wrappers):
        passed.append(vars(env))
        env = env.env
    if not passed:
        return functools.partial(getattr, env, name)

    def read() -> Any:
        for own in passed:
            if name in own:
                return own[name]
        return getattr(env, name)

    return read


def _only_hands_on(env: Any, name: str, wrappers: Any) -> bool:
    """Whether an attribute that a wrapper does not have itself is that of what it wraps."""
    kinds = wrappers.BaseWrapper, wrappers.OrderEnforcingWrapper, wrappers.BaseParallelWrapper
    made: Any = type(env)
    ordinary: Any = object.__getattribute__
    return (
        isinstance(env, kinds)
        and made.__getattribute__ is ordinary
        and any(made.__getattr__ is kind.__getattr__ for kind in kinds)
        and not hasattr(made, name)
        and "env" in vars(env)
    )
