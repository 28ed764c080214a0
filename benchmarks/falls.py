"""How far CartPole's return falls after it was solved, by seed: to try changes of settings.

    python benchmarks/falls.py --seeds 60
    python benchmarks/falls.py --seeds 60 lr=5e-4 entropy_coefficient=0.003
    python benchmarks/falls.py --seeds 60 --nothing-given

The last command uses what a run chooses if nothing is given, with one runner.

One process samples and learns in turn, with weights that are two updates old, as in a whole run. So
a seed always gives the same result, and a fall can be examined again. The return is the mean of the
last 100 episodes, after every update.
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

from juggler.driver.agent_tables import FoundGroup
from juggler.driver.config import RunConfig
from juggler.driver.config_files import load_config_and_keys
from juggler.driver.defaults import settled
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.sampler import Sampler
from juggler.learner.algorithms.registry import build_learner
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.mergeable_state import State, merge
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.wire.spaces import space_to_message

LAG = 2  # updates
SOLVED = 475.0
LATEST = 3_000_000  # steps by which it has to be solved
MORE = 500_000  # steps after that


def fall(base: RunConfig, changes: dict[str, Any], seed: int) -> tuple[int | None, float]:
    """(steps until it was solved, the least return after that); None: it was not solved."""
    torch.set_num_threads(1)
    seed_process(seed)
    config = RunConfig.from_flat({**base.flat(), **changes})
    rows, steps = config.env_runner.envs_per_runner, config.env_runner.fragment_steps
    env = gymnasium.make_vec("CartPole-v1", rows, vectorization_mode="vector_entry_point")
    spaces = env.single_observation_space, env.single_action_space
    pieces = config.connectors.parsed()
    connectors, module_to_env = build_runner_pipelines(pieces, *spaces)
    kept = connectors.observation_space, spaces[1]
    learner = build_learner(config.learner, None, *kept, {}, connectors=pieces, seed=seed)
    module = build_module(None, *kept, {})
    strip_to_acting(module)
    policy = Actor(module, rows, steps, seed, module_to_env, connectors)
    sampler = Sampler(env, policy, steps, seed)
    learned: State = {}  # by connectors
    weights = deque([learner.get_weights()], maxlen=LAG + 1)
    returns: deque[float] = deque(maxlen=100)
    trained, solved, least = 0, None, 500.0
    while trained < (LATEST if solved is None else solved + MORE):
        policy.load(weights[0])
        fragment = sampler.sample((1, trained))
        if delta := fragment.connector_delta:
            learned = merge(learned, delta) if learned else delta
            connectors.set_state(learned)
        learner.update_from_episodes([fragment.batch])
        newest = learner.get_weights()
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
    parser.add_argument("--nothing-given", action="store_true", help="not the shipped settings")
    parser.add_argument("changes", nargs="*", help="KEY=VALUE, the value in JSON")
    given = parser.parse_args()
    pairs = (change.split("=", 1) for change in given.changes)
    changes = {key: json.loads(value) for key, value in pairs}
    base = load_config_and_keys("cartpole")[0]
    if given.nothing_given:
        env = gymnasium.make("CartPole-v1")
        spaces = map(space_to_message, (env.observation_space, env.action_space))
        base, said = settled(RunConfig(), (), [FoundGroup((), *spaces)])
        print(said)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(partial(fall, base, changes), range(given.seeds)))
    steps = [solved for solved, _ in found if solved is not None]
    counts = [f"{sum(least < limit for _, least in found)}" for limit in (400, 450, 470)]
    head = ["seeds", "solved", "steps, median (most)", "below 400", "below 450", "below 470"]
    reached = f"{median(steps) / 1e3:.0f}k ({max(steps) / 1e3:.0f}k)"
    row = [str(given.seeds), str(len(steps)), reached, *counts]
    name = "nothing given" if given.nothing_given else "as shipped"
    print(table(" ".join(given.changes) or name, head, [row]))


if __name__ == "__main__":
    main()
