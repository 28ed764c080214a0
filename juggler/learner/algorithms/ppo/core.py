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
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
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
    ParameterGroupState,
    State,
)
from juggler.learner.core.hashing import mixed
from juggler.learner.core.learner_core import (
    ALONE,
    Aux,
    Columns,
    GradientAux,
    Grads,
    Metrics,
    Sample,
    Seam,
    StepOutput,
)
from juggler.learner.core.live_mean import LiveMean
from juggler.learner.core.metrics import mean_metrics
from juggler.learner.core.returns import Estimates, gae
from juggler.learner.optim.parameter_group_state import copied, with_steps
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

    Modules without a state learn from steps, those with a state from segments of episodes. Each
    parameter group keeps a key, from which the deal of minibatches follows.
    """

    name = "ppo"
    learns_from_episodes = True
    takes_advantages = True
    mean_names = ("kl",)
    config: PpoConfig

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        return {"key": torch.tensor(seed % 2**32)}  # []

    def next_extra(self, new: ParameterGroupState, aux: GradientAux) -> dict[str, Tensor]:
        return {"key": (new["extra"]["key"] + 1) % 2**32}  # [] counts steps of the optimizer

    def step(self, state: State, sample: Sample, seam: Seam = ALONE) -> StepOutput[State]:
        config, before = self.config, state
        prepared, live_steps = self._prepared(state, sample, seam)
        state = copied(state)  # if the seam fails midway, the old one stays as it was
        each: list[Metrics] = []
        stopped: dict[str, Tensor] = {}  # [] bool by group
        for minibatch in self._minibatches(before, prepared):
            grads, aux = seam.gradients(*super().grads(state, minibatch))
            if config.target_kl is not None:
                aux = _until(config.target_kl, aux, stopped)
            state, metrics, _ = self.apply(state, grads, aux)
            # A step counts once for schedules, however often it is learned from: see below.
            state = with_steps(state, {group_id: before[group_id]["steps"] for group_id in grads})
            each.append(metrics)
        state = with_steps(state, self._counted(before, state, live_steps))
        return StepOutput(state, _metrics(each, prepared))

    def step_in_parts(
        self, state: State, sample: Sample, seam: Seam, minibatches: int | None, epochs: int | None
    ) -> StepOutput[State]:
        config = self.config
        other = copy.copy(self)
        other.config = replace(
            config,
            minibatches=minibatches or config.minibatches,
            epochs=epochs or config.epochs,
        )
        return other.step(state, sample, seam)

    def grads(self, state: State, sample: Sample) -> tuple[Grads, Aux]:
        """Gradients of a first optimizer step with the whole sample as its minibatch."""
        prepared, _ = self._prepared(state, sample, ALONE)
        return super().grads(state, {key: table.columns for key, table in prepared.items()})

    def loss(self, forward: Forward, columns: Columns, state: ParameterGroupState) -> Loss:
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
    def _prepared(
        self, state: State, sample: Sample, seam: Seam
    ) -> tuple[dict[str, Table], dict[str, Tensor]]:
        """By module id: the table of a sample, and the number of live steps [] in the samples of
        all learners."""
        estimated = {
            module_id: self._estimated(self.forward(state, module_id).in_chunks(), columns)
            for module_id, columns in sample.items()
        }
        advantages = {key: columns[ADVANTAGES] for key, columns in estimated.items()}
        lives = {key: columns[c.LIVE] for key, columns in estimated.items()}
        device = next(iter(state.values()))["parameters"].device
        normalized, live_steps = self._normalized(advantages, lives, seam, device)
        tables = {}
        for module_id, columns in estimated.items():
            columns = {**columns, ADVANTAGES: normalized[module_id]}
            if self.modules[module_id].get_initial_state():
                tables[module_id] = Table.of_segments(columns)
            else:
                of_steps = {name: columns[name] for name in _OF_STEPS if name in columns}
                tables[module_id] = Table.of_steps(of_steps)
        return tables, live_steps

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

    def _normalized(
        self,
        advantages: Mapping[str, Tensor],
        live: Mapping[str, Tensor],
        seam: Seam,
        device: torch.device,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By module id: advantages [N, T] of mean 0 and variance 1 over the live steps of all
        learners, and the number of these steps []."""
        # Over all modules of the core, because all learners must reduce the same.
        absent = torch.zeros(3, dtype=torch.float64, device=device)
        own = [_sums(advantages[key], live[key]) if key in live else absent for key in self.modules]
        sums = dict(zip(self.modules, seam.sums(torch.stack(own)), strict=True))  # [3] each
        live_steps = {key: each[0].long() for key, each in sums.items()}  # []
        if not self.config.normalize_advantages:
            return dict(advantages), live_steps
        normalized = {}
        for key, values in advantages.items():
            mean, mean_square = sums[key][1:] / sums[key][0].clamp(min=1)  # []
            deviation = (mean_square - mean.square()).clamp(min=0).sqrt()  # []
            normalized[key] = ((values - mean) / (deviation + 1e-8)).to(values.dtype)  # [N, T]
        return normalized, live_steps

    def _minibatches(self, state: State, tables: Mapping[str, Table]) -> Iterator[Sample]:
        """The minibatches of all epochs; each epoch deals the tables out anew."""
        keys = {
            key: state[group.id]["extra"]["key"]
            for group in self._groups.values()
            for key in group.modules
        }
        for epoch in range(self.config.epochs):
            dealt = {
                key: table.minibatches(mixed(mixed(keys[key]) ^ epoch), self.config.minibatches)
                for key, table in tables.items()
            }
            # The same number at every learner, even if its sample has no part for any module.
            for _ in range(self.config.minibatches):
                yield {key: next(parts) for key, parts in dealt.items()}

    def _counted(
        self, before: State, after: State, live_steps: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """By group, the steps trained on [], including this update's if it made any optimizer
        step."""
        counted = {}
        for group in self._groups.values():
            old = before[group.id]
            moved = after[group.id]["extra"]["key"] != old["extra"]["key"]  # []
            most = reduce(torch.maximum, (live_steps[key] for key in group.modules))  # []
            counted[group.id] = old["steps"] + moved * most  # []
        return counted


def _sums(advantages: Tensor, live: Tensor) -> Tensor:
    """The number of live steps, and the sums of their advantages and of the squares -> [3]."""
    doubles = advantages.double() * live  # [N, T]
    return torch.stack([live.sum(), doubles.sum(), doubles.square().sum()])  # [3]


def _until(target_kl: float, aux: Aux, stopped: dict[str, Tensor]) -> Aux:
    """Set live steps to 0 for groups whose policy has moved too far; records these in `stopped`."""
    held = {}
    for group_id, found in aux.items():
        far = [means["kl"] > 1.5 * target_kl for means in found.means.values()]  # [] bool
        stopped[group_id] = reduce(
            operator.or_, far, stopped.get(group_id, torch.zeros_like(far[0]))
        )
        held[group_id] = found._replace(
            live_steps={key: steps * ~stopped[group_id] for key, steps in found.live_steps.items()},
            metrics={
                key: {**metrics, "kl_stop_fraction": stopped[group_id].float()}
                for key, metrics in found.metrics.items()
            },
        )
    return held


def _metrics(each: Sequence[Metrics], tables: Mapping[str, Table]) -> Metrics:
    """Means over the optimizer steps, and the explained variance of the values before them."""
    metrics = mean_metrics(each)
    for key, table in tables.items():
        mean = LiveMean(table.columns[c.LIVE])
        targets, values = table.columns[TARGETS], table.columns[OLD_VALUES]  # [N, T] or [N T]
        metrics[key]["explained_variance"] = mean.explained_variance(targets, targets - values)
    return metrics
