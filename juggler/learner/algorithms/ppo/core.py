"""PPO: Schulman et al. 2017, "Proximal Policy Optimization Algorithms".

PPO learns from a sample several times, but only while the policy π stays near the policy μ that
sampled it. Advantages Â_t and value targets are generalized advantage estimates (Schulman et
al. 2016) with the values V_old of the weights before the update. They are computed once per sample.
Then each of `epochs` passes distributes the sample's live steps over `minibatches` optimizer steps.
The loss on one minibatch, a mean over its live steps t with r_t = π(a_t|x_t) / μ(a_t|x_t),
is the sum of

    policy    - min(r_t Â_t, clip(r_t, 1 - ε, 1 + ε) Â_t)                              (equation 7)
    value     + value_coefficient 1/2 (V(x_t) - target_t)²                             (equation 9)
    entropy   - entropy_coefficient H(π(·|x_t))

As in the authors' program, advantages are normalized to mean 0 and variance 1 over
the live steps of the sample. With `value_clip`, the value loss uses the greater of (V - target)²
and (V_old + clip(V - V_old) - target)². With `target_kl`, an update ends at the first minibatch in
which KL(μ || π) is more than 1.5 times `target_kl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from juggler.learner.algorithms.actor_critic.core import (
    ActorCriticCore,
    PolicyAndValues,
    actor_critic_pass,
    clipped_surrogates,
    inputs_and_values,
    with_extra,
)
from juggler.learner.algorithms.ppo import PpoConfig
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
from juggler.learner.core.mean_metrics import LiveMean, mean_metrics
from juggler.learner.core.returns import Estimates, gae
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

# Columns that are computed for a sample.
ADVANTAGES: Final = "advantages"
TARGETS: Final = "targets"
OLD_VALUES: Final = "old_values"

# Inputs of modules without a state. Few samples have the second.
_SEEN = (c.OBSERVATIONS, c.CRITIC_OBSERVATIONS)
_OF_STEPS = (*_SEEN, c.ACTIONS, c.ACTION_LOGP, c.LIVE, ADVANTAGES, TARGETS, OLD_VALUES)


class Ppo(ActorCriticCore):
    """The core of PPO.

    Modules without a state learn from steps, modules with a state from segments of episodes. The
    key in the training state determines the minibatches.
    """

    name = "ppo"
    learns_from_episodes = True
    takes_advantages = True
    mean_names = ("kl",)
    config: PpoConfig

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        return {"key": torch.tensor(seed % 2**32)}  # []

    def next_extra(self, new: TrainState, aux: Aux) -> dict[str, Tensor]:
        return {"key": (new["extra"]["key"] + 1) % 2**32}  # [] counts optimizer steps

    def step(
        self, state: TrainState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[TrainState]:
        config, before = self.config, state
        table, live_steps = self._prepared(state, sample, seam)
        state = copied(state)  # if the seam fails midway, the old state is unchanged
        each: list[Metrics] = []
        stopped = torch.zeros_like(live_steps, dtype=torch.bool)  # []
        for minibatch in self._minibatches(before["extra"]["key"], table):
            grads, aux = seam.gradients(*super().grads(state, minibatch))
            if config.target_kl is not None:
                stopped = stopped | (aux.means["kl"] > 1.5 * config.target_kl)  # []
                metrics = {**aux.metrics, "kl_stop_fraction": stopped.float()}
                aux = aux._replace(live_steps=aux.live_steps * ~stopped, metrics=metrics)
            state, metrics, _ = self.apply(state, grads, aux)
            # Schedules count each step once, however often it is learned from: see below.
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

    def grads(self, state: TrainState, sample: Columns) -> tuple[Grads, Aux]:
        """Return the gradients of the first optimizer step, on the whole sample."""
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
        # The greater of both errors, so that clipping never lowers the loss.
        if config.value_clip is not None:
            old = columns[OLD_VALUES]  # [B]
            near = old + (values - old).clamp(-config.value_clip, config.value_clip)  # [B]
            squares = torch.maximum(squares, (near - targets).square())  # [B]
        value_loss = 0.5 * mean(squares)  # []

        entropy = mean(policy.entropy())  # []
        total = self.total(policy_loss, value_loss, entropy, state)  # []
        with torch.no_grad():
            # Learners of a group stop together, so they share the mean of this divergence.
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
        self, state: TrainState, sample: Columns, seam: Seam
    ) -> tuple[MinibatchTable, Tensor]:
        """Build a sample's table, and count live steps [] of all learners."""
        columns = self._estimated(self.forward(state).in_chunks(), sample)
        advantages, live_steps = _normalized(columns[ADVANTAGES], columns[c.LIVE], seam)
        if self.config.normalize_advantages:
            columns = {**columns, ADVANTAGES: advantages}
        live = columns[c.LIVE]  # [N, T]
        if self.module.get_initial_state():
            rows = columns[c.SEGMENT_ROWS]  # [S]
            return MinibatchTable(
                columns, rows.new_zeros(1), live.new_ones(1, len(rows))
            ), live_steps
        of_steps = {name: columns[name] for name in _OF_STEPS if name in columns}
        flat = tree_map(lambda x: x.flatten(0, 1), of_steps)  # [N T, ...]
        return MinibatchTable(flat, row_keys(columns[c.ACTION_LOGP], live), live), live_steps

    def _estimated(self, forward: Forward, columns: Columns) -> Columns:
        """Add advantages, targets and old values to the columns.

        `live` marks the steps to learn from. Training passes are of bounded size.
        """
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
        """Estimate by GAE, for the policy that sampled."""
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
        """Return 0, as estimates are for the policy that sampled."""
        live = columns[c.LIVE]  # [N, T]
        if self.config.burn_in:
            live = actor_critic_pass(forward, columns, self.config.burn_in).live
        return torch.zeros_like(columns[c.REWARDS]), live

    def _minibatches(self, key: Tensor, table: MinibatchTable) -> Iterator[Columns]:
        """Yield the minibatches of all epochs; each epoch deals them again."""
        minibatches, epochs = self.passes()
        for epoch in range(epochs):
            yield from table.minibatches(mixed(mixed(key) ^ epoch), minibatches)


def _normalized(advantages: Tensor, live: Tensor, seam: Seam) -> tuple[Tensor, Tensor]:
    """Normalize advantages [N, T] across learners; also count live steps []."""
    doubles = advantages.double() * live  # [N, T]
    sums = seam.sums(torch.stack([live.sum(), doubles.sum(), doubles.square().sum()]))  # [3]
    mean, mean_square = sums[1:] / sums[0].clamp(min=1)  # []
    deviation = (mean_square - mean.square()).clamp(min=0).sqrt()  # []
    normalized = ((advantages - mean) / (deviation + 1e-8)).to(advantages.dtype)  # [N, T]
    return normalized, sums[0].long()


_32_BITS = 2**32 - 1


def row_keys(contents: Tensor, live: Tensor) -> Tensor:
    """Hash live steps of each row -> [N], in `mixed`'s range.

    A row has the same hash in every sample, so a sample and its parts at several learners are dealt
    in the same way.

    Args:
        contents: [N, T] floats that differ between rows, such as log-probabilities of actions.
        live: [N, T] bool
    """
    numbers = (contents * 2**20).to(torch.int64) & _32_BITS  # [N, T]
    steps = torch.arange(live.shape[1], device=live.device)  # [T]
    return (mixed(numbers ^ mixed(steps)) * live).sum(1) & _32_BITS  # [N]


def split_into_minibatches(
    key: Tensor, rows: Tensor, present: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Distribute the entries of a table over `count` minibatches.

    Every minibatch gets an equal, random part of every row's present entries, and of its absent
    entries. If a row does not divide evenly, some places of minibatches stay empty.

    Args:
        key: [], in the range of `mixed`; each key deals differently.
        rows: [N], the keys of the rows, in the same range.
        present: [N, T] bool.
        count: k.

    Returns:
        The indices of each minibatch's entries in the flattened table, [k, B] int64, and whether an
        entry is present there, [k, B] bool. B is N T / k or a little more.
    """
    n, t = present.shape
    width = -(-t // count)
    steps = torch.arange(t, device=present.device)  # [T]
    row_draws = mixed(rows ^ key)  # [N]
    draws = mixed(row_draws.unsqueeze(1) ^ steps)  # [N, T]
    order = (draws + (~present << 32)).argsort(1)  # [N, T] present entries first
    order = pad(order, (0, width * count - t), value=-1).view(n, width, count)  # -1: in no row
    # Each row deals in turns, starting from a different minibatch. Otherwise all rows that do not
    # divide evenly would leave the last minibatches short.
    turns = torch.arange(count, device=present.device) + row_draws.unsqueeze(1)  # [N, k]
    turns = (turns % count).unsqueeze(1).expand(-1, width, -1)  # [N, width, k]
    dealt = order.gather(2, turns)  # [N, width, k]
    places = dealt.clamp(min=0) + t * torch.arange(n, device=present.device).view(n, 1, 1)
    places = places.movedim(2, 0).flatten(1)  # [k, B]
    there = (dealt >= 0).movedim(2, 0).flatten(1)  # [k, B]
    return places, present.flatten()[places] & there


class MinibatchTable(NamedTuple):
    """A sample's steps, or segments of a stateful module, for minibatches."""

    columns: Columns  # of steps [N T, ...], or of a sample with segments [N, T, ...]
    rows: Tensor  # [R] keys of rows of steps, or of one row of segments
    present: Tensor  # [R, I] bool: entries to learn from

    def minibatches(self, key: Tensor, count: int) -> Iterator[Columns]:
        """Yield minibatches: steps [B, ...], or all columns of some segments."""
        dealt, all_there = split_into_minibatches(
            key, self.rows, self.present, count
        )  # [k, B] both
        if c.SEGMENT_ROWS in self.columns:
            for places, there in zip(dealt, all_there, strict=True):
                segments = {name: self.columns[name][places] for name in c.SEGMENTS}  # [B]
                segments[c.SEGMENT_LENGTHS] = segments[c.SEGMENT_LENGTHS] * there  # [B]
                yield {**self.columns, **segments}
            return
        # Numbers are gathered for all minibatches at once. Large columns, such as images, are
        # gathered when their minibatch is due.
        numbers, large = dict[str, Tensor](), dict[str, Any]()
        for name, each in self.columns.items():
            is_number = isinstance(each, Tensor) and each.ndim == 1
            (numbers if is_number else large)[name] = each
        gathered = {name: each[dealt].unbind() for name, each in numbers.items()}  # k x [B]
        gathered[c.LIVE] = all_there.unbind()  # k x [B]
        for place, at in enumerate(dealt.unbind()):
            steps = tree_map(lambda x, at=at: x.index_select(0, at), large)  # [B, ...]
            yield {**steps, **{name: each[place] for name, each in gathered.items()}}
