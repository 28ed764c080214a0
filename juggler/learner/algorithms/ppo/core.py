"""PPO: Schulman et al. 2017, "Proximal Policy Optimization Algorithms".

PPO learns from a sample several times, but only as long as the policy π stays near the policy μ
that sampled it. Advantages Â_t and value targets are generalized advantage estimates (Schulman et
al. 2016) with the values V_old of the weights before the update. They are computed once for a
sample. Then each of `epochs` passes deals the sample's live steps out to `minibatches` optimizer
steps. The loss on one minibatch, a mean over its live steps t with r_t = π(a_t|x_t) / μ(a_t|x_t),
is the sum of

    policy    - min(r_t Â_t, clip(r_t, 1 - ε, 1 + ε) Â_t)                              (equation 7)
    value     + value_coefficient 1/2 (V(x_t) - target_t)²                             (equation 9)
    entropy   - entropy_coefficient H(π(·|x_t))

As in the program of the paper's authors, advantages are normalized to mean 0 and variance 1 over
the live steps of the sample. With `value_clip`, the value loss uses the greater of (V - target)²
and (V_old + clip(V - V_old) - target)². With `target_kl`, an update ends at the first minibatch in
which KL(μ || π) is more than 1.5 times `target_kl`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from juggler.learner.algorithms.actor_critic.core import (
    ActorCriticCore,
    PolicyAndValues,
    actor_critic_pass,
    clipped_surrogates,
    inputs_and_values,
    with_extra,
)
from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.learner.algorithms.ppo.minibatches import Table
from juggler.learner.core.gradient_core import (
    Forward,
    Loss,
    TrainState,
    copied,
)
from juggler.learner.core.hashing import mixed
from juggler.learner.core.learner_core import (
    ALONE,
    Aux,
    Columns,
    Grads,
    Metrics,
    Seam,
    StepOutput,
)
from juggler.learner.core.live_mean import LiveMean
from juggler.learner.core.metrics import mean_metrics
from juggler.learner.core.returns import Estimates, gae
from juggler.runtime.modules import columns as c

# Columns that are computed for a sample, beside its own.
ADVANTAGES: Final = "advantages"
TARGETS: Final = "targets"
OLD_VALUES: Final = "old_values"

# Columns that modules without a state see, and learn from. Few have the second.
_SEEN = (c.OBSERVATIONS, c.CRITIC_OBSERVATIONS)
_OF_STEPS = (*_SEEN, c.ACTIONS, c.ACTION_LOGP, c.LIVE, ADVANTAGES, TARGETS, OLD_VALUES)


class Ppo(ActorCriticCore):
    """The core of PPO.

    Modules without a state learn from steps, those with a state from segments of episodes. The
    state has a key, from which the deal of minibatches follows.
    """

    name = "ppo"
    learns_from_episodes = True
    takes_advantages = True
    mean_names = ("kl",)
    config: PpoConfig

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        return {"key": torch.tensor(seed % 2**32)}  # []

    def next_extra(self, new: TrainState, aux: Aux) -> dict[str, Tensor]:
        return {"key": (new["extra"]["key"] + 1) % 2**32}  # [] counts steps of the optimizer

    def step(
        self, state: TrainState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[TrainState]:
        config, before = self.config, state
        table, live_steps = self._prepared(state, sample, seam)
        state = copied(state)  # if the seam fails midway, the old one stays as it was
        each: list[Metrics] = []
        stopped = torch.zeros_like(live_steps, dtype=torch.bool)  # []
        for minibatch in self._minibatches(before["extra"]["key"], table):
            grads, aux = seam.gradients(*super().grads(state, minibatch))
            if config.target_kl is not None:
                stopped = stopped | (aux.means["kl"] > 1.5 * config.target_kl)  # []
                metrics = {**aux.metrics, "kl_stop_fraction": stopped.float()}
                aux = aux._replace(live_steps=aux.live_steps * ~stopped, metrics=metrics)
            state, metrics, _ = self.apply(state, grads, aux)
            # A step counts once for schedules, however often it is learned from: see below.
            state["steps"] = before["steps"]
            each.append(metrics)
        moved = state["extra"]["key"] != before["extra"]["key"]  # []
        state["steps"] = before["steps"] + moved * live_steps  # []
        found = mean_metrics(each)
        targets = table.columns[TARGETS]  # [N T], or [N, T]
        errors = targets - table.columns[OLD_VALUES]  # [N T], or [N, T]
        mean = LiveMean(table.columns[c.LIVE])
        found["explained_variance"] = mean.explained_variance(targets, errors)
        return StepOutput(state, found)

    def step_in_parts(
        self,
        state: TrainState,
        sample: Columns,
        seam: Seam,
        minibatches: int | None,
        epochs: int | None,
    ) -> StepOutput[TrainState]:
        config = self.config
        other = copy.copy(self)
        other.config = replace(
            config,
            minibatches=minibatches or config.minibatches,
            epochs=epochs or config.epochs,
        )
        return other.step(state, sample, seam)

    def grads(self, state: TrainState, sample: Columns) -> tuple[Grads, Aux]:
        """Gradients of a first optimizer step with the whole sample as its minibatch."""
        table, _ = self._prepared(state, sample, ALONE)
        return super().grads(state, table.columns)

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        config = self.config
        if c.SEGMENT_ROWS in columns:
            inputs, values, _, live = actor_critic_pass(forward, columns, config.burn_in)
        else:
            seen = {name: columns[name] for name in _SEEN if name in columns}
            inputs, values = inputs_and_values(forward, forward(seen))
            live = columns[c.LIVE]
        # All tensors below are [B], or [N, T] for modules with a state.
        policy = forward.module.action_distribution()(inputs)
        mean = LiveMean(live)
        advantages, targets = columns[ADVANTAGES], columns[TARGETS]

        # The log-probabilities of steps that are not live may be anything.
        action_logp = policy.log_prob(columns[c.ACTIONS])  # [B] under π
        log_ratios = torch.where(live, action_logp - columns[c.ACTION_LOGP], 0.0)  # [B]
        ratios = log_ratios.exp()  # [B]
        surrogates, outside = clipped_surrogates(ratios, advantages, config.clip)  # [B] both
        policy_loss = -mean(surrogates)  # []

        squares = (values - targets).square()  # [B]
        if config.value_clip is not None:
            old = columns[OLD_VALUES]  # [B]
            near = old + (values - old).clamp(-config.value_clip, config.value_clip)  # [B]
            squares = torch.maximum(squares, (near - targets).square())  # [B]
        value_loss = 0.5 * mean(squares)  # []

        entropy = mean(policy.entropy())  # []
        total = self.total(policy_loss, value_loss, entropy, state)  # []
        with torch.no_grad():
            kl = mean.kl(log_ratios, ratios)  # []
            metrics = {
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy.detach(),
                "kl": kl,
                "clip_fraction": mean(outside.float()),
            }
        return Loss(total, mean.live_steps, metrics, means={"kl": kl})

    @torch.no_grad()
    def _prepared(self, state: TrainState, sample: Columns, seam: Seam) -> tuple[Table, Tensor]:
        """The table of a sample, and the number of live steps [] in the samples of all learners."""
        columns = self._estimated(self.forward(state).in_chunks(), sample)
        advantages, live_steps = _normalized(columns[ADVANTAGES], columns[c.LIVE], seam)
        if self.config.normalize_advantages:
            columns = {**columns, ADVANTAGES: advantages}
        if self.module.get_initial_state():
            return Table.of_segments(columns), live_steps
        of_steps = {name: columns[name] for name in _OF_STEPS if name in columns}
        return Table.of_steps(of_steps), live_steps

    def _estimated(self, forward: Forward, columns: Columns) -> Columns:
        """The columns of a sample with advantages, targets and old values; `live` marks the steps
        to learn from. Training passes are of bounded size."""
        seen = actor_critic_pass(forward, columns, self.config.burn_in)
        estimates = self.estimates(columns, seen, torch.zeros_like(seen.values))
        return {
            **columns,
            c.LIVE: seen.live,
            ADVANTAGES: estimates.advantages,
            TARGETS: estimates.targets,
            OLD_VALUES: seen.values,
        }

    def estimates(self, columns: Columns, seen: PolicyAndValues, log_ratios: Tensor) -> Estimates:
        """By generalized advantage estimation, for the policy that sampled."""
        config = self.config
        estimates = gae(
            rewards=columns[c.REWARDS] * config.reward_scale,
            values=seen.values,
            next_values=seen.next_values,
            terminated=columns[c.TERMINATED],
            truncated=columns[c.TRUNCATED],
            live=seen.live,
            gamma=config.gamma,
            lambda_=config.lambda_,
        )
        return with_extra(estimates, columns)

    def log_ratios(self, forward: Forward, columns: Columns) -> tuple[Tensor, Tensor]:
        """0: it estimates for the policy that sampled."""
        live = columns[c.LIVE]  # [N, T]
        if self.config.burn_in:
            live = actor_critic_pass(forward, columns, self.config.burn_in).live
        return torch.zeros_like(columns[c.REWARDS]), live

    def passes(self) -> tuple[int, int]:
        return self.config.minibatches, self.config.epochs

    def _minibatches(self, key: Tensor, table: Table) -> Iterator[Columns]:
        """The minibatches of all epochs; each epoch deals the table out again."""
        for epoch in range(self.config.epochs):
            yield from table.minibatches(mixed(mixed(key) ^ epoch), self.config.minibatches)


def _normalized(advantages: Tensor, live: Tensor, seam: Seam) -> tuple[Tensor, Tensor]:
    """Advantages [N, T] of mean 0 and variance 1 over the live steps of all learners, and the
    number of these steps []."""
    doubles = advantages.double() * live  # [N, T]
    sums = seam.sums(torch.stack([live.sum(), doubles.sum(), doubles.square().sum()]))  # [3]
    mean, mean_square = sums[1:] / sums[0].clamp(min=1)  # []
    deviation = (mean_square - mean.square()).clamp(min=0).sqrt()  # []
    normalized = ((advantages - mean) / (deviation + 1e-8)).to(advantages.dtype)  # [N, T]
    return normalized, sums[0].long()
