"""IMPALA: Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures".

Many actors sample with a policy μ that is some updates old; a learner improves the policy π. The
loss of π and its value function V on a batch, a mean over its live steps t, is the sum of

    policy    - advantage_t log π(a_t|x_t)         advantages and targets v_t by V-trace (4.1)
    value     + value_coefficient 1/2 (v_t - V(x_t))²
    entropy   - entropy_coefficient H(π(·|x_t))    (4.2)
"""

from __future__ import annotations

import torch

from juggler.learner.algorithms.actor_critic.core import ActorCriticCore, actor_critic_pass
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.core.gradient_core import Forward, Loss, ParameterGroupState
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.live_mean import LiveMean
from juggler.learner.core.returns import vtrace
from juggler.runtime.modules import columns as c


class Impala(ActorCriticCore):
    """The core of IMPALA."""

    name = "impala"
    trains_on = frozenset({"episodes", "batch"})
    learns_from_episodes = True
    config: ImpalaConfig

    def loss(self, forward: Forward, columns: Columns, state: ParameterGroupState) -> Loss:
        config = self.config
        inputs, values, next_values, live = actor_critic_pass(forward, columns, config.burn_in)
        policy = forward.module.action_distribution()(inputs)  # [N, T]
        mean = LiveMean(live)

        action_logp = policy.log_prob(columns[c.ACTIONS])  # [N, T] under π
        with torch.no_grad():
            # The log-probabilities of steps that are not live may be anything.
            log_ratios = torch.where(live, action_logp - columns[c.ACTION_LOGP], 0.0)  # [N, T]
            estimates = vtrace(
                log_ratios=log_ratios,
                rewards=columns[c.REWARDS] * config.reward_scale,
                values=values,
                next_values=next_values,
                terminated=columns[c.TERMINATED],
                truncated=columns[c.TRUNCATED],
                live=live,
                gamma=config.gamma,
                lambda_=config.lambda_,
                rho_bar=config.rho_bar,
                rho_bar_pg=config.rho_bar_pg,
                c_bar=config.c_bar,
            )

        errors = estimates.targets - values  # [N, T]
        policy_loss = -mean(estimates.advantages * action_logp)  # []
        value_loss = 0.5 * mean(errors.square())  # []
        entropy = mean(policy.entropy())  # []
        entropy_coefficient = self.schedules["entropy_coefficient"](state["steps"])  # []
        total = (
            policy_loss
            + config.value_coefficient * value_loss
            - entropy_coefficient.to(entropy.dtype) * entropy
        )  # []

        with torch.no_grad():
            metrics = {
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy.detach(),
                "kl": mean.kl(log_ratios),
                "clip_fraction": mean((log_ratios.exp() > config.rho_bar).float()),
                "explained_variance": mean.explained_variance(estimates.targets, errors),
            }
        return Loss(total, mean.live_steps, metrics, means={})
