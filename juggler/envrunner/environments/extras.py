"""The simulators that Juggler's extras bring."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Final

from gymnasium.envs.registration import registry
from gymnasium.error import DependencyNotInstalled

from juggler.runtime.installing import installing

#: Extras by the Python packages that make the environments.
EXTRAS: Final = {
    "ale_py": "atari",
    "envpool": "envpool",
    "gymnasium.envs.box2d": "box2d",
    "gymnasium.envs.mujoco": "mujoco",
}

#: What those of Gymnasium's own modules import, by extra.
_IMPORTED: Final = {"box2d": ("Box2D", "pygame"), "mujoco": ("mujoco",)}


def extra_for(env: str) -> str | None:
    """The extra that an environment needs; None: none, or nobody knows.

    Args:
        env: its name, as in a configuration.
    """
    module = _module_of(env)
    needed = (extra for package, extra in EXTRAS.items() if f"{module}.".startswith(f"{package}."))
    return next(needed, None)


def check_extra(env: str) -> None:
    """
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
    """As `check_extra`, as far as that shows without importing anything.

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
        f"{installing(extra)}, wherever this run has envrunners"
    )


def _module_of(env: str) -> str:
    """Where an environment is registered or made; empty where its name does not lead there."""
    module, colon, _ = env.rpartition(":")
    if colon:
        return module
    entry_point = registry[env].entry_point if env in registry else None
    return entry_point.partition(":")[0] if isinstance(entry_point, str) else ""
