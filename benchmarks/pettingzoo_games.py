"""Trains every game of PettingZoo that is installed, with defaults, and counts what went wrong.

    python benchmarks/pettingzoo_games.py                     # 50,000 agent steps of each
    python benchmarks/pettingzoo_games.py --steps 5000 mpe2/simple_spread_v3

The games are those of PettingZoo's own API tests in its families classic and butterfly, and of the
package mpe2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
from collections.abc import Iterator

from commands import table, train

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs

FAMILIES = {"classic": "pettingzoo.classic", "butterfly": "pettingzoo.butterfly", "mpe2": "mpe2"}


def games() -> list[str]:
    """Names such as "classic/connect_four_v3", whether what they need is installed or not."""
    return list(_games())


def _games() -> Iterator[str]:
    for family, package in FAMILIES.items():
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if re.search(r"_v\d+$", module.name):
                yield f"{family}/{module.name}"


def why_not(name: str) -> str:
    """Which package a game lacks here; "" if it can be made."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # some open a window otherwise
    try:
        config = EnvRunnerConfig(env=f"pettingzoo:{name}", envs_per_runner=1)
        make_multi_agent_envs(config).close()
    except ValueError as error:
        if "needs the package" in str(error):
            return str(error)
        raise
    except EnvironmentFailed as error:
        if "ImportError" in str(error):
            return str(error)
        raise
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="which games; none: all of them")
    parser.add_argument("--steps", type=int, default=50_000, help="agent steps of each")
    said = parser.parse_args()
    rows = []
    for name in said.names or games():
        if reason := why_not(name):
            print(f"{name}: {reason}", flush=True)
            continue
        try:
            end, _ = train("--env", f"pettingzoo:{name}", "--stop-steps", said.steps)
        except subprocess.CalledProcessError as error:
            rows.append([name, "-", "-", "-", f"exit status {error.returncode}"])
            continue
        dropped = sum(steps for why, steps in end["env_steps_dropped"].items() if why != "shutdown")
        rows.append(
            [
                name,
                str(end["env_steps_trained"]),
                str(end["episodes"]),
                f"{end['wall_time']:.0f}",
                f"{dropped} steps dropped, {end['restarts']} restarts",
            ]
        )
        print(*rows[-1], flush=True)
    print(table("games of PettingZoo", ["game", "steps", "episodes", "seconds", "faults"], rows))


if __name__ == "__main__":
    main()
