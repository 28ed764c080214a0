"""Sixteen learners at once under vmap, compared with sixteen in turn.

Both make the same updates in one process: sixteen learning rates on the same samples of CartPole.
Prints one JSON line: milliseconds of CPU for an update of all sixteen, in pairs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import gymnasium
import numpy as np
import torch

from juggler import ActorCritic
from juggler.envrunner.sampler import Sampler
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.population import Population
from juggler.learner.learner import Learner
from juggler.runtime.acting.actor import Actor
from juggler.runtime.actors.resources import keep_freed_memory
from juggler.runtime.modules.acting_part import strip_to_acting

RATES = np.geomspace(1e-5, 1e-2, 16).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each half of a pair")
    given = parser.parse_args()

    keep_freed_memory()
    env = gymnasium.make_vec("CartPole-v1", num_envs=given.envs, vectorization_mode="sync")
    spaces = env.single_observation_space, env.single_action_space

    def make_module() -> ActorCritic:
        return ActorCritic(*spaces, {"hidden_sizes": given.hidden})

    def make_core(lr: float) -> Impala:
        return Impala(make_module, ImpalaConfig(lr=lr))

    module = make_module()
    strip_to_acting(module)
    policy = Actor(module, given.envs, given.steps, seed=0)
    sampler = Sampler(env, policy, given.steps, seed=0)
    together = Learner(Population(make_core(1e-3), hyperparameters={"lr": RATES}))
    alone = [Learner(make_core(lr), seed=seed) for seed, lr in enumerate(RATES)]
    samples = [
        together.sample_from_episodes([sampler.sample((1, update)).batch]) for update in range(8)
    ]

    def in_turn(sample: Columns) -> None:
        for learner in alone:
            learner.step(sample)

    found = [
        (
            _milliseconds(in_turn, samples, given.seconds),
            _milliseconds(together.step, samples, given.seconds),
        )
        for _ in range(given.pairs + 1)
    ][1:]  # the first pair warms up
    print(json.dumps({"in_turn": [a for a, _ in found], "together": [b for _, b in found]}))


def _milliseconds(
    step: Callable[[Columns], object], samples: list[Columns], seconds: float
) -> float:
    """CPU time of one update, of this process's only busy thread."""
    updates, started = 0, time.process_time()
    while time.process_time() - started < seconds:
        step(samples[updates % len(samples)])
        updates += 1
    return 1e3 * (time.process_time() - started) / updates


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
