"""BC, behavioural cloning (Pomerleau 1991).

"Efficient Training of Artificial Neural Networks for Autonomous Navigation".

A policy π learns the actions of a data set, by supervised learning. The loss on a sample is a
mean over its live steps t:

    - log π(a_t|x_t) - entropy_coefficient H(π(·|x_t))

The value function is not trained.
"""

from __future__ import annotations

import torch

from juggler.learner.algorithms.actor_critic.core import actor_critic_pass
from juggler.learner.algorithms.bc import BcConfig
from juggler.learner.core.gradient_core import Forward, GradientCore, Loss, TrainState
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.mean_metrics import LiveMean
from juggler.runtime.modules import columns as c


class Bc(GradientCore):
    """BC's core, for modules with "action_dist_inputs" and "values"."""

    name = "bc"
    learns_from_episodes = True
    learns_from_rewards = False
    config: BcConfig

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        seen = actor_critic_pass(forward, columns)
        policy = forward.module.action_distribution()(seen.action_dist_inputs)  # [N, T]
        mean = LiveMean(seen.live)
        logp = policy.log_prob(columns[c.ACTIONS])  # [N, T]
        # The log-probability of a step that is not live may be anything.
        policy_loss = -mean(torch.where(seen.live, logp, 0.0))  # []
        entropy = mean(policy.entropy())  # []
        total = policy_loss - self.config.entropy_coefficient * entropy  # []
        metrics = {"policy_loss": policy_loss.detach(), "entropy": entropy.detach()}
        return Loss(total, mean.live_steps, metrics, means={})
