"""Golden numbers of synchronous runs.

A commit that changes a rule renews the numbers and says which rule it was:

    JUGGLER_RENEW=1 python -m pytest -m slow tests/system/test_golden_runs.py

Libraries round differently on each kind of processor, unless they use what all processors have.
Weights are compared by their sums and norms, within a tolerance that no other rule stays in.
Line-ups use Python's numbers alone, and are compared by their hash.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.league_world import AGENTS, begun, finished, line_up, ready
from support.place import REPOSITORY, Place, metrics

from juggler.driver.league.builders import AlphaStar
from juggler.driver.league.config import LeagueConfig
from juggler.runtime.checkpoints.checkpoint import read

GOLDEN = Path(__file__).with_name("golden_runs.json")

#: NumPy, its BLAS, MKL, oneDNN and torch take the instructions that every x86 processor has.
SAME_EVERYWHERE = {
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "OPENBLAS_CORETYPE": "Nehalem",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "ATEN_CPU_CAPABILITY": "default",
}

SETTINGS = """
synchronous = true
seed = 3
progress = "off"
num_env_runners = 2
envs_per_runner = 4
fragment_steps = 16
"""
REPLAY = "replay_begin = 100\nreplay_ratio = 8.0\nreplay_batch_size = 32\n"

CASES = {
    "impala": 'algorithm = "impala"\nenv = "CartPole-v1"\nbatch_size = 110\nstop_steps = 1500\n',
    "ppo": 'algorithm = "ppo"\nenv = "CartPole-v1"\nbatch_size = 220\nstop_steps = 1500\n',
    "dqn": f'algorithm = "dqn"\nenv = "CartPole-v1"\nbatch_size = 50\nstop_steps = 400\n{REPLAY}',
    "sac": f'algorithm = "sac"\nenv = "Pendulum-v1"\nbatch_size = 50\nstop_steps = 400\n{REPLAY}',
    "r2d2": """
        algorithm = "r2d2"
        env = "CartPole-v1"
        batch_size = 50
        stop_steps = 800
        replay_begin = 100
        replay_ratio = 8.0
        replay_batch_size = 8
        model = {hidden_sizes = [16], recurrent = "lstm"}
    """,
    "two modules": """
        env = "support.small_games:Tag"
        stop_steps = 1500
        [modules.adversary]
        batch_size = 150
        [modules.runner]
        algorithm = "ppo"
        batch_size = 80
        minibatches = 2
    """,
}
#: Metrics that depend on rules alone, not on time.
COUNTED = ("updates", "env_steps_sampled", "env_steps_trained", "env_steps_dropped", "episodes")


def summed(tree: Any, path: str = "") -> dict[str, list[float]]:
    """Sum and norm of each array of floats, by its path."""
    if isinstance(tree, dict):
        return {
            key: value
            for name, part in tree.items()
            for key, value in summed(part, f"{path}/{name}").items()
        }
    values = np.asarray(tree)
    if values.dtype.kind != "f" or "replay" in path:
        return {}
    values = values.astype(np.float64)
    return {path: [float(values.sum()), float(np.sqrt(np.square(values).sum()))]}


def numbers(run_dir: Path) -> dict[str, Any]:
    """Weights, optimizers, counters and losses at the end of a run."""
    line = metrics(run_dir)[-1]
    losses = {
        f"{module_id}/{name}": value
        for module_id, module in line["modules"].items()
        for name, value in module.items()
        if isinstance(value, float) and not name.endswith(("seconds", "rate", "per_second"))
    }
    return {
        "metrics": " ".join(sorted(line)),
        "counted": {key: line[key] for key in COUNTED},
        "return": line["episode_return_mean"],
        "losses": losses,
        "state": summed(read(run_dir).tree),
    }


def line_ups() -> str:
    """Hash of a league's line-ups, with matches that end by their numbers."""
    builder = AlphaStar(min_phase_steps=300, max_phase_steps=900)
    league = begun(LeagueConfig(max_historical=8), builder, seed=5)
    drawn = hashlib.sha256()
    for number in range(600):
        assigned = line_up(league)
        drawn.update(json.dumps([*assigned.players.items()]).encode())
        won = 1.0 if number % 3 else -1.0
        league.finish_match(*finished(assigned, *(won, -won)[: len(AGENTS)]))
        for player in {each for each in assigned.players.values() if league.roster[each].learning}:
            league.trained(player, 20)
        ready(league, league.build())
    return drawn.hexdigest()


def assert_golden(name: str, found: Any) -> None:
    """Compare numbers with the file's, or renew these on request."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("JUGGLER_RENEW"):
        lines = [
            f"{json.dumps(each)}: {json.dumps(value, sort_keys=True)}"
            for each, value in sorted({**golden, name: found}.items())
        ]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    assert_near(found, golden[name], name)


def assert_near(found: Any, golden: Any, path: str) -> None:
    if isinstance(golden, dict):
        assert found.keys() == golden.keys(), path
        for key in golden:
            assert_near(found[key], golden[key], f"{path}/{key}")
    elif isinstance(golden, list):
        # A sum may be near 0, but not further from the other one than a part of the norm.
        np.testing.assert_allclose(found, golden, rtol=1e-3, atol=1e-3 * golden[1], err_msg=path)
    elif isinstance(golden, float):
        np.testing.assert_allclose(found, golden, rtol=1e-2, atol=1e-4, err_msg=path)
    else:
        assert found == golden, path


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_synchronous_run_gives_the_golden_numbers(name: str, place: Place) -> None:
    place.write("run.toml", SETTINGS + CASES[name])
    path = f"{REPOSITORY}{os.pathsep}{REPOSITORY}/tests"
    run = place.start("train", "run.toml", "--run-dir", "run", PYTHONPATH=path, **SAME_EVERYWHERE)
    assert run.wait(120) == 0, run.output
    assert_golden(name, numbers(place.path / "run"))


def test_a_league_draws_the_golden_line_ups() -> None:
    assert_golden("line-ups", line_ups())
