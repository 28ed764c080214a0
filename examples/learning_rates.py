"""Sixteen learning rates, compared at once on one stream of data.

    python examples/learning_rates.py

A `Population` is one algorithm under `torch.func.vmap`. Its sixteen members make their updates
together, and differ only in their learning rates. The members take turns to sample a fragment, from
which all sixteen learn; V-trace corrects for the differences of their policies. At the end each
member plays by itself. This takes about 20 seconds.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from juggler import (
    Actor,
    ActorCritic,
    Impala,
    ImpalaConfig,
    Learner,
    Population,
    Sampler,
    strip_to_acting,
)

RATES = np.geomspace(1e-5, 1e-1, 16).tolist()
ENVS, STEPS, UPDATES = 8, 32, 500


def make_module() -> ActorCritic:
    env = gymnasium.make("CartPole-v1")
    return ActorCritic(env.observation_space, env.action_space, {"hidden_sizes": [32]})


def make_learner() -> Learner:
    config = ImpalaConfig(reward_scale=0.1, grad_clip=1.0)
    core = Impala(make_module, config)
    population = Population(core, hyperparameters={"lr": RATES}, same_start=True)
    return Learner(population, seed=0)


class Player:
    """Plays CartPole with the weights that it is given."""

    def __init__(self, seed: int) -> None:
        module = make_module()
        strip_to_acting(module)
        env = gymnasium.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="sync")
        self.policy = Actor(module, ENVS, STEPS, seed)
        self.sampler = Sampler(env, self.policy, STEPS, seed)


def weights_of(learner: Learner, index: int) -> dict[str, Any]:
    """Weights of one member."""
    weights: dict[str, Any] = learner.get_weights()  # [16, ...] each
    return {name: array[index] for name, array in weights.items()}


def main() -> None:
    learner = make_learner()
    player = Player(seed=0)
    for update in range(UPDATES):
        player.policy.load(weights_of(learner, update % len(RATES)))
        learner.update_from_episodes([player.sampler.sample((1, update)).batch])
    for index in range(len(RATES)):
        player = Player(seed=1)
        player.policy.load(weights_of(learner, index))
        returns: list[float] = []
        for fragment in range(32):
            returns += player.sampler.sample((1, fragment)).episode_returns
        print(f"learning rate {RATES[index]:.1e}: return {np.mean(returns):5.1f}")


if __name__ == "__main__":
    main()
