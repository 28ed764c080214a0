"""APPO: PPO's clipped objective for steps that older policies sampled.

Luo et al. 2020, "IMPACT: Importance Weighted Asynchronous Architectures with Clipped Target
Networks", section 3. The policy π has to stay near a target network, not near the policy μ that
sampled a batch. The target network is a copy of the parameters, updated every `target_period`
optimizer steps. So a batch may be old, and may be used several times: the learner keeps some
batches in a circular buffer. With π' and V' of the target network, the loss on a batch,
a mean over its live steps t, is the sum of

    r_t = min(ρ, μ(a_t|x_t) / π'(a_t|x_t)) π(a_t|x_t) / μ(a_t|x_t)             ρ = behaviour_clip

    policy    - min(r_t Â_t, clip(r_t, 1 - ε, 1 + ε) Â_t)
    value     + value_coefficient 1/2 (v_t - V(x_t))²
    entropy   - entropy_coefficient H(π(·|x_t))
    distance  + β KL(π'(·|x_t) || π(·|x_t))

V-trace gives advantages Â_t and targets v_t for the policy π' and values V' (Espeholt et al. 2018,
section 4.1). The distance is part of the loss if `target_kl` is set. Whenever the target
network is updated, β doubles if the last KL was more than 1.5 times `target_kl`, and halves if it
was less than `target_kl` / 1.5 (Schulman et al. 2017, "Proximal Policy Optimization Algorithms",
section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from juggler.learner.algorithms.actor_critic.core import actor_critic_pass, clipped_surrogates
from juggler.learner.algorithms.appo import AppoConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import Forward, Loss, MakeModule, TrainState
from juggler.learner.core.learner_core import Aux, Columns
from juggler.learner.core.mean_metrics import LiveMean
from juggler.learner.data.sources import CircularBuffer, DataSource
from juggler.runtime.modules import columns as c


class Appo(Impala):
    """The core of APPO, with IMPALA's estimates.

    Its state also has the target network's parameters, the optimizer steps since they were copied,
    and β.
    """

    name = "appo"
    config: AppoConfig

    def __init__(self, make_module: MakeModule, config: AppoConfig) -> None:
        super().__init__(make_module, config)
        self.mean_names = () if config.target_kl is None else ("kl_from_target",)
        # A state's `steps` count each use of a batch; schedules count environment steps.
        self.schedules = {
            key: partial(_after_uses, schedule, config.batch_uses)
            for key, schedule in self.schedules.items()
        }

    def source_of_new(self) -> DataSource:
        return CircularBuffer(self.config.buffer_batches, self.config.batch_uses)

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        extra = {"target": parameters.clone(), "since_copy": torch.zeros((), dtype=torch.int64)}
        if self.config.target_kl is not None:
            extra["kl_coefficient"] = torch.as_tensor(
                self.config.kl_coefficient, dtype=torch.get_default_dtype()
            )  # []
        return extra

    def next_extra(self, new: TrainState, aux: Aux) -> dict[str, Tensor]:
        target, since_copy = new["extra"]["target"], new["extra"]["since_copy"] + 1  # [P], []
        due = since_copy >= self.config.target_period  # []
        extra = {
            "target": torch.where(due, new["parameters"], target),  # [P]
            "since_copy": torch.where(due, 0, since_copy),  # []
        }
        if self.config.target_kl is not None:
            kl = aux.means["kl_from_target"]  # []
            factor = torch.where(kl > 1.5 * self.config.target_kl, 2.0, 1.0)  # []
            factor = torch.where(kl < self.config.target_kl / 1.5, 0.5, factor)  # []
            factor = torch.where(due, factor, 1.0)  # [] just after its update the KL is 0 for any β
            extra["kl_coefficient"] = new["extra"]["kl_coefficient"] * factor  # []
        return extra

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        config = self.config
        inputs, values, _, live = actor_critic_pass(forward, columns, config.burn_in)
        policy = forward.module.action_distribution()(inputs)  # [N, T]
        mean = LiveMean(live)

        actions, behaviour_logp = columns[c.ACTIONS], columns[c.ACTION_LOGP]  # [N, T, ...], [N, T]
        with torch.no_grad():
            target = forward.using(state["extra"]["target"])
            seen = actor_critic_pass(target, columns, config.burn_in)
            target_policy = forward.module.action_distribution()(seen.action_dist_inputs)  # [N, T]
            # The log-probabilities of steps that are not live may be anything.
            target_log_ratios = torch.where(
                live, target_policy.log_prob(actions) - behaviour_logp, 0.0
            )  # [N, T] log π' / μ
            estimates = self.estimates(columns, seen, target_log_ratios)
            behaviour_weights = (-target_log_ratios).exp().clamp(max=config.behaviour_clip)

        # r_t: the first factor is bounded, and has no gradient.
        log_ratios = torch.where(live, policy.log_prob(actions) - behaviour_logp, 0.0)  # [N, T]
        ratios = behaviour_weights * log_ratios.exp()  # [N, T]
        surrogates, outside = clipped_surrogates(ratios, estimates.advantages, config.clip)
        policy_loss = -mean(surrogates)  # []
        errors = estimates.targets - values  # [N, T]
        value_loss = 0.5 * mean(errors.square())  # []
        entropy = mean(policy.entropy())  # []
        total = self.total(policy_loss, value_loss, entropy, state)  # []
        # The distance keeps π near π' where clipping alone does not.
        means = {}
        if config.target_kl is not None:
            distance = mean(target_policy.kl(policy))  # []
            total = total + state["extra"]["kl_coefficient"] * distance  # []
            means["kl_from_target"] = distance.detach()

        with torch.no_grad():
            metrics = {
                **means,
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy.detach(),
                # From the behaviour policy, as in other algorithms, and not from the target.
                "kl": mean.kl(log_ratios),
                "clip_fraction": mean(outside.float()),
                "explained_variance": mean.explained_variance(estimates.targets, errors),
            }
        return Loss(total, mean.live_steps, metrics, means)


def _after_uses(schedule: Callable[[Tensor], Tensor], uses: int, steps: Tensor) -> Tensor:
    """Return a schedule's value [] when steps are used several times."""
    return schedule(steps // uses)
