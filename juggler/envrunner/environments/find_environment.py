"""Finds environments by name, and wraps them. No torch here."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator, registry
from gymnasium.vector import VectorEnv

from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.pufferlib import SCHEME as PUFFERLIB
from juggler.envrunner.environments.pufferlib import find_native, needs_pufferlib
from juggler.envrunner.environments.simulator_extras import (
    check_extra,
    check_extra_there,
    extra_for,
)
from juggler.envrunner.failures import failures_of
from juggler.runtime.modules.import_by_name import SCRIPT, is_there, no_module
from juggler.runtime.near_matches import nearest

#: Prefix of the names of Gymnasium's environments with a part of their spaces for each agent.
TUPLES: Final = "tuples:"

Env = gymnasium.Env[Any, Any]
VectorEnvironment = VectorEnv[Any, Any, Any]
#: Makes one environment from env_kwargs, or N of them as one VectorEnv.
EnvironmentFactory = Callable[..., Env | VectorEnvironment]


def find_environment(name: str) -> EnvSpec | EnvironmentFactory:
    """Find the registered environment or the callable that `env` names.

    Raises:
        ValueError: there is no such environment, or its package is not installed.
        EnvironmentFailed: importing its module failed.
    """
    if name.startswith(PUFFERLIB):
        return find_native(name)
    check_extra(name)
    module_name, colon, attribute = name.rpartition(":")
    callables: list[str] = []
    # The module may register the environment when it is imported.
    if colon:
        module = _imported(name, module_name)
        found = functools.reduce(
            lambda at, key: getattr(at, key, None), attribute.split("."), module
        )
        if callable(found):
            return found
        callables = [key for key, at in vars(module).items() if callable(at)]
    if attribute in registry:
        return registry[attribute]
    raise ValueError(_unknown(name, callables))


def check_name(name: str) -> None:
    """Check an environment's name without importing its module.

    Raises:
        ValueError: there is no such environment, or its package is not installed.
    """
    name = name.removeprefix(TUPLES)
    module_name, colon, _ = name.rpartition(":")
    if name.startswith(SCHEME):
        return
    if name in registry:
        return check_extra_there(name)
    if not colon:
        raise ValueError(_unknown(name, []))
    if not is_there(module_name):
        if name.startswith(PUFFERLIB):
            raise ValueError(needs_pufferlib(name, module_name))
        check_extra(name)
        raise ValueError(no_module(name, "env", module_name.partition(".")[0]))


def is_name(name: str) -> bool:
    """Return whether `check_name` accepts a name."""
    try:
        check_name(name)
    except ValueError:
        return False
    return True


class ScriptEnvironment:
    """An environment that a script registered. Unpickling registers it again."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        registry.setdefault(spec.id, spec)

    def __reduce__(self) -> tuple[type[ScriptEnvironment], tuple[EnvSpec]]:
        entries = {key: getattr(self.spec, key) for key in ("entry_point", "vector_entry_point")}
        # Other processes have another __main__, so the class itself is sent.
        own: dict[str, Any] = {
            key: load_env_creator(at)
            for key, at in entries.items()
            if isinstance(at, str) and at.startswith(SCRIPT)
        }
        return ScriptEnvironment, (dataclasses.replace(self.spec, **own),)


def registered_in_script(name: str) -> ScriptEnvironment | None:
    """Return the environment of an id that only this script registers."""
    spec = registry.get(name)
    if spec is None or extra_for(name) is not None:
        return None
    entry = spec.entry_point or spec.vector_entry_point
    module = entry if isinstance(entry, str) else str(getattr(entry, "__module__", ""))
    plugins = {each.module.partition(".")[0] for each in entry_points(group="gymnasium.envs")}
    # A script may register one of Gymnasium's own classes under another id.
    known = f'"{name}"' in inspect.getsource(gymnasium.envs)
    return None if known or module.partition(".")[0] in plugins else ScriptEnvironment(spec)


def _unknown(name: str, callables: list[str]) -> str:
    module_name, colon, attribute = name.rpartition(":")
    # Without the module's name, which they have in common.
    near = [f"{module_name}:{each}" for each in _nearest(attribute, callables)]
    near += _nearest(attribute, registry)
    if not (colon and near):
        near = _environments_in(module_name or name.removesuffix(".py")) or near
    if name.startswith("ALE/"):
        near = [f"ale_py:{name}"]  # it is registered once its module is imported
    return (
        f"env {name!r}: "
        + (f"module {module_name!r} has no callable {attribute!r}, and " if colon else "")
        + f"no environment is registered as {attribute!r}. "
        + (f"Nearest: {', '.join(near)}. " if near else "")
        + 'Name an environment that a module registers or makes as "module:Id-v0" or '
        '"module:callable": the processes of a run import that module. In Python, a callable may '
        "be passed, too."
    )


def _environments_in(module: str) -> list[str]:
    """List classes in a module that look like environments.

    The module is not imported; only packages around it are.
    """
    try:
        spec = importlib.util.find_spec(module)
        source = ast.parse(Path((spec and spec.origin) or "").read_bytes())
    except (ImportError, ValueError, OSError, SyntaxError):  # no such module, or no source
        return []
    classes = [each for each in source.body if isinstance(each, ast.ClassDef)]
    return [f"{module}:{each.name}" for each in classes if _looks_like_one(each)]


def _looks_like_one(source: ast.ClassDef) -> bool:
    methods = {each.name for each in source.body if isinstance(each, ast.FunctionDef)}
    return {"reset", "step"} <= methods or any(
        ast.unparse(base).endswith("Env") for base in source.bases
    )


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    by_lower_case = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=3)
    return [by_lower_case[key] for key in near]


def _imported(name: str, module: str) -> object:
    missing = ""
    with failures_of(f"module {module!r}", "import"):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module exists, and something that it imports does not
            missing = error.name
    raise ValueError(no_module(name, "env", missing))


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
    make, name = source, getattr(source, "__qualname__", type(source).__name__)

    def wrapped(**env_kwargs: Any) -> Env:
        env: Any = make(**env_kwargs)
        if not isinstance(env, gymnasium.Env):
            env.close()
            raise ValueError(
                f"env_wrappers and max_episode_steps are for single environments, and "
                f"{name} makes a {type(env).__name__}: let it wrap its own"
            )
        # The outermost is the last one.
        for wrapper in wrappers:
            env = load_env_creator(wrapper.entry_point)(env=env, **wrapper.kwargs or {})
        made: Env = env
        return made

    # Errors name environments by it.
    wrapped.__qualname__ = name
    return wrapped


def _spec(piece: object) -> WrapperSpec:
    options = dict(piece) if isinstance(piece, Mapping) else {"use": piece}
    use = options.pop("use", None)
    if not isinstance(use, str) or not use:
        raise ValueError(
            f"env_wrappers: a wrapper must be a name, or a table with a 'use', not {piece!r}"
        )
    # A name without a module is one of Gymnasium's.
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
