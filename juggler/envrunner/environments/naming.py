"""From the name of an environment to what makes it. No torch here."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, registry
from gymnasium.vector import VectorEnv

from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.extras import check_extra, check_extra_there
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.modules.by_name import is_there, no_module

Env = gymnasium.Env[Any, Any]
VectorEnvironment = VectorEnv[Any, Any, Any]
#: Called with env_kwargs; makes one environment, or N of them as one VectorEnv.
EnvironmentFactory = Callable[..., Env | VectorEnvironment]


def find(name: str) -> EnvSpec | EnvironmentFactory:
    """What `env` names: a registered environment, or a callable of a module."""
    check_extra(name)
    module_name, colon, attribute = name.rpartition(":")
    callables: list[str] = []
    if colon:
        module = _imported(name, module_name)
        found = functools.reduce(
            lambda at, key: getattr(at, key, None), attribute.split("."), module
        )
        if callable(found):
            return found
        callables = [f"{module_name}:{key}" for key, at in vars(module).items() if callable(at)]
    if attribute in registry:
        return registry[attribute]
    raise ValueError(_unknown(name, callables))


def check_name(name: str) -> None:
    """What `find` would say of a name, as far as that shows without importing what it leads to.

    Raises:
        ValueError: it leads nowhere.
    """
    module_name, colon, _ = name.rpartition(":")
    if name.startswith(SCHEME):
        return
    if name in registry:
        return check_extra_there(name)
    if not colon:
        raise ValueError(_unknown(name, []))
    if not is_there(module_name):
        check_extra(name)
        raise ValueError(no_module(name, "env", module_name.partition(".")[0]))


def is_name(name: str) -> bool:
    """Whether this is an environment's name, as far as `check_name` can tell."""
    try:
        check_name(name)
    except ValueError:
        return False
    return True


def _unknown(name: str, callables: list[str]) -> str:
    module_name, colon, attribute = name.rpartition(":")
    near = _nearest(name, callables) + _nearest(attribute, registry)
    if name.startswith("ALE/"):
        near = [f"ale_py:{name}"]  # nothing is registered before its module is imported
    return (
        f"env {name!r}: "
        + (f"module {module_name!r} has no callable {attribute!r}, and " if colon else "")
        + f"no environment is registered as {attribute!r}. "
        + (f"Nearest: {', '.join(near)}. " if near else "")
        + 'An environment that a module registers or makes is named as "module:Id-v0" or '
        '"module:callable".'
    )


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    by_lower_case = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=3)
    return [by_lower_case[key] for key in near]


def _imported(name: str, module: str) -> object:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            # The module is there; something that it imports is not.
            raise EnvironmentFailed.during(f"module {module!r}", "import", error) from None
        raise ValueError(no_module(name, "env", error.name)) from None
    except Exception as error:
        raise EnvironmentFailed.during(f"module {module!r}", "import", error) from None
