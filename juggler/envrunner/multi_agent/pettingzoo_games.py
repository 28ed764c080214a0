"""Finds environments of PettingZoo by name."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any, Final

from juggler.envrunner.environments.simulator_extras import check_extra
from juggler.envrunner.failures import failures_of

#: Prefix of the names of PettingZoo's environments.
SCHEME: Final = "pettingzoo:"

#: Methods by which a class is recognized as one of PettingZoo's interfaces.
METHODS: Final = ("observation_space", "action_space", "reset", "step")

#: A package of environments that PettingZoo's registry does not list.
_MPE: Final = "mpe2"


def find_game(name: str) -> Callable[..., Any]:
    """Find the function that makes an environment of PettingZoo.

    If an environment has both interfaces, it makes the Parallel one.

    Args:
        name: "pettingzoo:FAMILY/GAME-vN", as in `pettingzoo.make`, or with "_vN"; FAMILY may be a
            package, such as mpe2, whose modules GAME_vN have `parallel_env` or `env`.

    Raises:
        ValueError: there is no such environment, or a package that it needs is not installed.
        EnvironmentFailed: importing its module failed.
    """
    check_extra(name)
    import pettingzoo  # an extra

    family, _, game = name.removeprefix(SCHEME).partition("/")
    id = f"{family}/{re.sub(r'_v(?=[0-9]+$)', '-v', game)}"
    for kind, registry in (
        ("parallel", pettingzoo.parallel_registry),
        ("aec", pettingzoo.aec_registry),
    ):
        if id in registry:
            entry_point = registry[id].entry_point
            if isinstance(entry_point, str):
                _imported(name, entry_point.partition(":")[0], family)
            return functools.partial(pettingzoo.make, kind, id)
    # Packages such as mpe2 follow PettingZoo's form, but register nothing.
    of_module = f"{family}.{id.rpartition('/')[2].replace('-v', '_v')}"
    if re.fullmatch(r"[A-Za-z_][\w.]*", of_module) and _is_there(of_module):
        module = _imported(name, of_module, family)
        make = getattr(module, "parallel_env", None) or getattr(module, "env", None)
        if callable(make):
            found: Callable[..., Any] = make
            return found
    raise ValueError(_unknown(name, family))


def native(env: Any) -> Any:
    """Unwrap a costly conversion of PettingZoo's.

    The conversion of turn-based environments to Parallel lets agents act out of turn, and its last
    step omits a dict. The conversion of Parallel environments to AEC makes one step for each agent.
    """
    conversions: Any = sys.modules.get("pettingzoo.utils.conversions")
    if conversions is None:
        return env
    if isinstance(env, conversions.turn_based_aec_to_parallel_wrapper):
        return env.aec_env
    ordered = isinstance(env, conversions.OrderEnforcingWrapper)
    if isinstance(inner := env.env if ordered else env, conversions.parallel_to_aec_wrapper):
        return inner.env
    return env


def _imported(name: str, module: str, family: str) -> Any:
    missing: str | None = None
    with failures_of(f"module {module!r}", "import"):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name
    extra = family if family == _MPE else f"pettingzoo[{family}]"
    raise ValueError(
        f"env {name!r} needs the package {missing}: pip install {shlex.quote(extra)}, on every "
        "host with EnvRunners"
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


def _unknown(name: str, family: str) -> str:
    import pettingzoo

    if family == _MPE and importlib.util.find_spec(_MPE) is None:
        return (
            f"env {name!r} needs the package mpe2: pip install mpe2, on every host with EnvRunners"
        )
    known = {*pettingzoo.aec_registry, *pettingzoo.parallel_registry}
    if (package := importlib.util.find_spec(_MPE)) is not None:
        paths = package.submodule_search_locations
        known |= {
            f"{_MPE}/{module.name.replace('_v', '-v')}"
            for module in pkgutil.iter_modules(paths)
            if re.search(r"_v[0-9]+$", module.name)
        }
    by_name = {f"{SCHEME}{each}": each for each in sorted(known)}
    # Also games of the same name in another version or family.
    near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.75)
    game = re.sub(r"[-_]v[0-9]+$", "", name.rpartition("/")[2])
    near += [each for each in by_name if f"/{game}-v" in each and each not in near]
    hint = f"Nearest: {', '.join(near)}." if near else f"There are {', '.join(by_name)}."
    return f"env {name!r}: PettingZoo has no such environment. {hint}"
