"""Vectors of scripted environments, of every kind and in every autoreset mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from juggler.envrunner.environments.environment_processes import (
    EnvironmentFunction,
    EnvironmentProcesses,
)
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.environments.step_infos import keep_own_finals
from juggler.envrunner.environments.vector import EnvironmentsInTurn
from support.environment_threads import environments_in_threads
from support.scripted_environments import NativeScripted, Script, Scripted

MODES = list(AutoresetMode)
KINDS = ("in turn", "native", "async", "sync")


def vector_of(
    kind: str, mode: AutoresetMode, scripts: Sequence[Script], box: bool = False
) -> VectorEnv[Any, Any, Any]:
    """Scripted environments, one for each script."""
    if kind == "native":
        return NativeScripted(scripts, mode, box)
    functions = [functools.partial(Scripted, script, box) for script in scripts]
    return vector_of_functions(kind, mode, functions)


def vector_of_functions(
    kind: str, mode: AutoresetMode, functions: Sequence[Callable[[], Any]]
) -> VectorEnv[Any, Any, Any]:
    if kind == "sync":
        vector = SyncVectorEnv(functions, copy=False, autoreset_mode=mode)
        keep_own_finals(vector)
        return vector
    if kind == "in turn":
        return EnvironmentsInTurn(functions, mode, "scripted")
    checked = [EnvironmentFunction(make, {}, "scripted", mode) for make in functions]
    with environments_in_threads():
        return EnvironmentProcesses(checked, mode, 30.0, "scripted")


def seeds_of(kind: str, seed: int, count: int) -> list[int]:
    """What the environments of such a vector are seeded with, when it is given a seed."""
    seeds = environment_seeds(seed, count)
    return [seeds[0] + i for i in range(count)] if kind == "native" else seeds
