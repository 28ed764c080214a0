"""IMPALA (Espeholt et al. 2018).

"IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures".

Many actors sample with a policy μ that is some updates old; a learner improves the policy π. The
loss of π and its value function V on a batch, a mean over its live steps t, is the sum of

    policy    - advantage_t log π(a_t|x_t)         advantages and targets v_t by V-trace (4.1)
    value     + value_coefficient 1/2 (v_t - V(x_t))²
    entropy   - entropy_coefficient H(π(·|x_t))    (4.2)
"""

from __future__ import annotations

import torch
from torch import Tensor

from juggler.learner.algorithms.actor_critic.core import (
    ActorCriticCore,
    PolicyAndValues,
    actor_critic_pass,
    with_extra,
)
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.core.gradient_core import Forward, Loss, TrainState
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.mean_metrics import LiveMean
from juggler.learner.core.returns import Estimates, vtrace
from juggler.learner.data.replay.replay import MixInReplay
from juggler.learner.data.sources import DataSource, Queue
from juggler.runtime.modules import columns as c

#: Factor above its bound from which a ratio counts as clipped. EnvRunners and learners compute
#: log-probabilities in different orders, so the same policy's differ by rounding, below 1e-5 in
#: float32.
_BEYOND_ROUNDING = 1 + 1e-4


class Impala(ActorCriticCore):
    """The core of IMPALA."""

    name = "impala"
    learns_from_episodes = True
    takes_advantages = True
    config: ImpalaConfig

    def data_source(self, seed: int = 0) -> DataSource:
        config, source = self.config, self.source_of_new()
        if not config.replay_share:
            return source
        return MixInReplay(
            source,
            share=config.replay_share,
            capacity=config.replay_capacity,
            saved=config.save_replay,
            seed=seed,
            directory=config.replay_directory,
            memory=config.replay_memory,
        )

    def source_of_new(self) -> DataSource:
        """Return the source of new samples; `replay_share` adds old rows."""
        return Queue()

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        config = self.config
        seen = actor_critic_pass(forward, columns, config.burn_in)
        policy = forward.module.action_distribution()(seen.action_dist_inputs)  # [N, T]
        live, mean = seen.live, LiveMean(seen.live)

        action_logp = policy.log_prob(columns[c.ACTIONS])  # [N, T] under π
        with torch.no_grad():
            # The log-probabilities of steps that are not live may be anything.
            log_ratios = torch.where(live, action_logp - columns[c.ACTION_LOGP], 0.0)  # [N, T]
            estimates = self.estimates(columns, seen, log_ratios)

        # The targets are constants, so this error moves only the values.
        errors = estimates.targets - seen.values  # [N, T]
        policy_loss = -mean(estimates.advantages * action_logp)  # []
        value_loss = 0.5 * mean(errors.square())  # []
        entropy = mean(policy.entropy())  # []
        total = self.total(policy_loss, value_loss, entropy, state)  # []

        # At the weights that EnvRunners acted with, each ratio is 1 up to rounding.
        with torch.no_grad():
            ratios = log_ratios.exp()  # [N, T]
            metrics = {
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy.detach(),
                "kl": mean.kl(log_ratios, ratios),
                "clip_fraction": mean((ratios > config.rho_bar * _BEYOND_ROUNDING).float()),
                "explained_variance": mean.explained_variance(estimates.targets, errors),
            }
        return Loss(total, mean.live_steps, metrics, means={})

    def estimates(self, columns: Columns, seen: PolicyAndValues, log_ratios: Tensor) -> Estimates:
        """Estimate by V-trace."""
        config = self.config
        estimates = vtrace(
            log_ratios=log_ratios,
            rewards=columns[c.REWARDS] * config.reward_scale,
            values=seen.values,
            next_values=seen.next_values,
            terminated=columns[c.TERMINATED],
            truncated=columns[c.TRUNCATED],
            live=seen.live,
            gamma=config.gamma,
            lambda_=config.lambda_,
            # ρ̄ decides which values are learned, and c̄ only how fast (section 4.1).
            rho_bar=config.rho_bar,
            rho_bar_pg=config.rho_bar_pg,
            c_bar=config.c_bar,
        )
        return with_extra(estimates, columns)
