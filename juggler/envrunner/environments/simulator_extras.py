"""The simulators that Juggler's extras install."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Final

from gymnasium.envs.registration import registry
from gymnasium.error import DependencyNotInstalled

from juggler.runtime.install_commands import installing

#: Extras by the Python package that makes the environments.
EXTRAS: Final = {
    "ale_py": "atari",
    "envpool": "envpool",
    "gymnasium.envs.box2d": "box2d",
    "gymnasium.envs.mujoco": "mujoco",
    "open_spiel": "openspiel",
    "pettingzoo": "pettingzoo",
}

#: Packages that Gymnasium's own environments import, by extra.
_IMPORTED: Final = {"box2d": ("Box2D", "pygame"), "mujoco": ("mujoco",)}


def extra_for(env: str) -> str | None:
    """Return the extra that an environment needs by its name, or None."""
    module = _module_of(env)
    needed = (extra for package, extra in EXTRAS.items() if f"{module}.".startswith(f"{package}."))
    return next(needed, None)


def check_extra(env: str) -> None:
    """Import the package that makes an environment.

    Raises:
        ValueError: the environment's extra is not installed.
    """
    if (extra := extra_for(env)) is None:
        return
    try:
        importlib.import_module(_module_of(env))
    except (DependencyNotInstalled, ModuleNotFoundError) as error:
        missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        raise ValueError(_needs(env, getattr(missing, "name", None) or extra, extra)) from error


def check_extra_there(env: str) -> None:
    """Find the packages that an environment needs, without importing them.

    Raises:
        ValueError: the environment's extra is not installed.
    """
    extra = extra_for(env) or ""
    for package in _IMPORTED.get(extra, ()):
        if importlib.util.find_spec(package) is None:
            raise ValueError(_needs(env, package, extra))


def _needs(env: str, package: str, extra: str) -> str:
    return (
        f"env {env!r} needs the package {package}: "
        f"{installing(extra)}, on every host with EnvRunners"
    )


def _module_of(env: str) -> str:
    """Return the module that registers or makes an environment; "": unknown."""
    module, colon, _ = env.rpartition(":")
    if colon:
        return module
    entry_point = registry[env].entry_point if env in registry else None
    return entry_point.partition(":")[0] if isinstance(entry_point, str) else ""
