"""How far CartPole falls after it was solved, seed by seed: for changes of the shipped settings.

    python benchmarks/falls.py --seeds 60
    python benchmarks/falls.py --seeds 60 lr=5e-4 entropy_coefficient=0.003

One process samples and learns in turn, with weights that are two updates old, as in a whole run.
So a seed brings the same whatever else the machine does, and a fall can be looked at again. The
return is the mean of the last 100 episodes, after every update.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
from commands import table

from juggler.driver.config import RunConfig
from juggler.driver.training import load_config
from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.envrunner.sampler import Sampler
from juggler.envrunner.seeding import seed_process
from juggler.learner.algorithms import build_learner
from juggler.runtime.modules.acting import strip_to_acting
from juggler.runtime.modules.building import build_module

LAG = 2  # updates
SOLVED = 475.0
LATEST = 3_000_000  # steps until which it has to be solved
MORE = 500_000  # steps behind that


def fall(changes: dict[str, Any], seed: int) -> tuple[int | None, float]:
    """(steps until it was solved; the least return after that); None: it was not."""
    torch.set_num_threads(1)
    seed_process(seed)
    config = RunConfig.from_flat({**load_config("cartpole").flat(), **changes})
    rows, steps = config.env_runner.envs_per_runner, config.env_runner.fragment_steps
    env = gymnasium.make_vec("CartPole-v1", rows, vectorization_mode="vector_entry_point")
    spaces = env.single_observation_space, env.single_action_space
    learner = build_learner(config.learner, None, *spaces, {}, seed=seed)
    module = build_module(None, *spaces, {})
    strip_to_acting(module)
    policy = BehaviourPolicy(module, rows, steps, seed)
    sampler = Sampler(env, policy, steps, seed)
    weights = deque([learner.get_weights()["default"]], maxlen=LAG + 1)
    returns: deque[float] = deque(maxlen=100)
    trained, solved, least = 0, None, 500.0
    while trained < (LATEST if solved is None else solved + MORE):
        policy.load(weights[0])
        fragment = sampler.sample((1, trained))
        learner.update_from_episodes([fragment.batch])
        newest = learner.get_weights()["default"]
        weights.append({name: np.copy(array) for name, array in newest.items()})
        trained += fragment.batch.live_steps
        returns.extend(fragment.episode_returns)
        mean = float(np.mean(returns or [0.0]))
        if solved is None and mean >= SOLVED:
            solved = trained
        if solved is not None:
            least = min(least, mean)
    return solved, least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("changes", nargs="*", help="key=value of the configuration, in JSON")
    given = parser.parse_args()
    pairs = (change.split("=", 1) for change in given.changes)
    changes = {key: json.loads(value) for key, value in pairs}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(partial(fall, changes), range(given.seeds)))
    steps = [solved for solved, _ in found if solved is not None]
    counts = [f"{sum(least < limit for _, least in found)}" for limit in (400, 450, 470)]
    head = ["seeds", "solved", "steps, median (most)", "below 400", "below 450", "below 470"]
    reached = f"{median(steps) / 1e3:.0f}k ({max(steps) / 1e3:.0f}k)"
    row = [str(given.seeds), str(len(steps)), reached, *counts]
    print(table(" ".join(given.changes) or "as shipped", head, [row]))


if __name__ == "__main__":
    main()
