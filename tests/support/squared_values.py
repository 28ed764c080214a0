"""A core of a user's own with a small module, and a sample for it."""

from __future__ import annotations

from functools import partial

import gymnasium

import juggler
from juggler.testing import sample_for

MODULE = partial(
    juggler.ActorCritic,
    gymnasium.spaces.Box(-1, 1, (3,)),
    gymnasium.spaces.Discrete(2),
    {"hidden_sizes": [4]},
)
SAMPLE = sample_for(MODULE())


class SquaredValues(juggler.GradientCore):
    """Minimizes the square of values."""

    name = "squared values"

    def loss(
        self,
        forward: juggler.Forward,
        columns: juggler.Columns,
        state: juggler.TrainState,
    ) -> juggler.Loss:
        _, values, _, live = juggler.actor_critic_pass(forward, columns)
        mean = juggler.LiveMean(live)
        total = mean(values.square())  # []
        return juggler.Loss(total, mean.live_steps, {"loss": total.detach()}, means={})
