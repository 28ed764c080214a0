"""PQN: Gallici et al. 2024, "Simplifying Deep Temporal Difference Learning".

A network estimates the value Q(x, a) of each action a. EnvRunners act ε-greedily: they take the
best action, or with probability ε any action. Targets are λ-returns. Because many environments are
sampled at once, no replay is needed; because layers are normalized, no target network is needed.
The loss on a sample is a mean over its live steps t:

    1/2 (G_t - Q(x_t, a_t))²        G_t = r_t + γ ((1 - λ) max_a Q(x_{t+1}, a) + λ G_{t+1})

If an episode is truncated or the row ends, G_{t+1} is max_a Q(x_{t+1}, a); if it terminates, G_t is
r_t. These are the targets of generalized advantage estimates for the values
V(x) = max_a Q(x, a).

The authors' program computes the targets of a sample once, and distributes its steps over
minibatches. Here each optimizer step uses whole rows, with targets from the newest weights.
"""

from __future__ import annotations

import torch

from juggler.learner.algorithms.actor_critic.core import actor_critic_pass
from juggler.learner.algorithms.off_policy.core import EpsilonGreedyCore, place_of
from juggler.learner.algorithms.pqn import PqnConfig
from juggler.learner.core.gradient_core import (
    Forward,
    Loss,
    TrainState,
)
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.mean_metrics import LiveMean
from juggler.learner.core.returns import gae
from juggler.runtime.modules import columns as c


class Pqn(EpsilonGreedyCore):
    """The core of PQN.

    Modules need a buffer "epsilon" to act with. In training they return the values of all actions
    as "action_dist_inputs", and the value of the best one as "values".
    """

    name = "pqn"
    config: PqnConfig

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        config = self.config
        values, best, next_best, live = actor_critic_pass(forward, columns)  # [N, T, n], 3 [N, T]
        mean = LiveMean(live)
        actions = place_of(forward.module, columns[c.ACTIONS]).unsqueeze(-1)  # [N, T, 1]
        chosen = values.gather(-1, actions).squeeze(-1)  # [N, T] Q(x_t, a_t)
        # The action of a step that is not live may be illegal, with the value -1e18.
        chosen = torch.where(live, chosen, 0.0)  # [N, T]
        with torch.no_grad():
            # With greedy values, GAE's targets are the λ-returns of Q.
            returns = gae(
                rewards=columns[c.REWARDS] * config.reward_scale,
                values=best,
                next_values=next_best,
                terminated=columns[c.TERMINATED],
                truncated=columns[c.TRUNCATED],
                live=live,
                gamma=config.gamma,
                lambda_=config.lambda_,
            ).targets  # [N, T] G_t
        # The targets take no gradient, so the best values are not learned.
        errors = returns - chosen  # [N, T]
        loss = 0.5 * mean(errors.square())  # []
        with torch.no_grad():
            metrics = {
                "value_loss": loss.detach(),
                "mean_value": mean(chosen),
                "explained_variance": mean.explained_variance(returns, errors),
            }
        return Loss(loss, mean.live_steps, metrics, means={})
