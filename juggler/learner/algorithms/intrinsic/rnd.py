"""Random network distillation: Burda et al. 2018, "Exploration by Random Network Distillation".

A constant network f with random parameters computes features of observations, and a predictor g
learns to match it. It errs on rare observations. The intrinsic reward of a step is the error at
the observation x' that the step led to, normalized:

    i_t = mean (g(x') - f(x'))² / σ

σ is the standard deviation of the discounted intrinsic return so far along a row, over all live
steps so far. In the paper, that return continues from one row of an environment to the next;
here it begins at 0 with each row, because successive rows of an environment may reach different
learners. What both networks see is normalized by the mean and the standard deviation of
observations so far, and clipped. Both statistics already include the steps to which they are
applied, so no warm-up steps are needed. The predictor learns from a share of the steps.

A step that terminates its episode has i_t = 0: EnvRunners do not send the last observation, as
nothing is bootstrapped from it. A truncated episode's last observation is known.

With a policy and a value function, intrinsic rewards have their own value function V_I and
discount, and no end: after an episode, the return continues in the next one. Their advantages are
estimated in the algorithm's way, and added to its own with a coefficient. Algorithms with a single
value get the bonus as part of the reward, whenever a step is learned from; there the return ends
with the episode.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from juggler.learner.algorithms.actor_critic.core import (
    EXTRA_ADVANTAGES,
    ActorCriticCore,
    PolicyAndValues,
)
from juggler.learner.config import IntrinsicConfig
from juggler.learner.core.around_core import AroundState, OwnNetwork, Rewarded, RewardingCore
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.hashing import mixed, uniform
from juggler.learner.core.learner_core import Columns, Seam
from juggler.learner.core.mean_metrics import LiveMean
from juggler.learner.core.returns import DISCOUNTS, terminated
from juggler.learner.core.sequences import all_observations
from juggler.runtime.checkpoints.checkpoint import RND
from juggler.runtime.connectors.learning import TensorMoments, no_moments, variance, with_live
from juggler.runtime.connectors.leaves import at, observed_leaves, replaced, space_with
from juggler.runtime.connectors.row_times import following, linear_recurrence
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.modules.encoders import build_encoder, feature_size
from juggler.runtime.modules.layers import initialized
from juggler.runtime.wire.structures import tree_map

_EPSILON = 1e-8  # added to variances
_ROUNDING = 1e-10  # a variance below this share of the squared mean is only rounding


class Rnd(RewardingCore):
    """Wraps a GradientCore, and adds rewards for new observations.

    Args:
        inner: the algorithm.
        config: the keys of the table `intrinsic`; None: their defaults.

    Raises:
        ValueError: the algorithm cannot learn from intrinsic rewards.
    """

    kind = RND
    own: IntrinsicConfig

    def __init__(self, inner: GradientCore, config: IntrinsicConfig | None = None) -> None:
        super().__init__(inner, config or IntrinsicConfig(), "leave out intrinsic")
        self._estimator: ActorCriticCore | None = None
        if isinstance(inner, ActorCriticCore) and inner.takes_advantages:
            self._estimator = copy.copy(inner)
            self._estimator.config = replace(
                inner.config, gamma=self.own.gamma_int, reward_scale=1.0
            )
        space, limit = inner.module.observation_space, self.own.clip
        boxes = {
            path: leaf
            for path, leaf in observed_leaves(space).items()
            if isinstance(leaf, spaces.Box)
        }
        self._shapes = {path: leaf.shape for path, leaf in boxes.items()}
        #: Paths of the observations' leaves, by their names in a state.
        self._paths = {".".join(path) or "observation": path for path in boxes}
        normalized = {
            path: spaces.Box(-limit, limit, shape, np.float32)
            for path, shape in self._shapes.items()
        }
        with_values = self._estimator is not None
        self.loss_names = ("predictor_loss", "intrinsic_value_loss")[: 1 + with_values]
        make = partial(Networks, space_with(space, normalized), self.own, with_values=with_values)
        self.network = OwnNetwork(f"{DEFAULT_MODULE} intrinsic", make, constant="target.")

    def own_state(self, seed: int) -> dict[str, Any]:
        observed = {name: no_moments(self._shapes[path]) for name, path in self._paths.items()}
        return {**super().own_state(seed), "observed": observed, "returns": no_moments()}

    def rewarded(self, state: AroundState, sample: Columns, seam: Seam) -> Rewarded:
        own, seen = dict(state["own"]), UniqueObservations.of(sample)
        # The moments of the known observations that live steps led to.
        own["observed"] = {
            name: with_live(
                own["observed"][name],
                at(seen.observations, path)[seen.after.flatten()],
                seen.known.flatten(),
                seam.sums,
            )
            for name, path in self._paths.items()
        }
        everything = self._normalized(own["observed"], seen.observations)
        # Errors of the predictor before it learns from these observations.
        errors = self.network.in_chunks(own, everything, "errors")[seen.after]  # [N, T]
        errors = torch.where(seen.known, errors, 0.0)  # [N, T]
        returns = along_rows(errors, seen.live, self.own.gamma_int)  # [N, T]
        own["returns"] = with_live(
            own["returns"], returns.flatten(), seen.live.flatten(), seam.sums
        )
        spread, mean = variance(own["returns"]), own["returns"]["mean"]  # [] both
        scaled = errors * torch.rsqrt(spread + _EPSILON).to(errors.dtype)  # [N, T]
        # As long as all returns are equal there is no scale yet. A NaN is passed on.
        rewards = torch.where(spread <= _ROUNDING * mean.square(), 0.0, scaled)  # [N, T]
        changed, targets = self._with_bonus(state["inner"], own, sample, seen, everything, rewards)
        metrics = {
            "intrinsic_reward": LiveMean(seen.live)(rewards),
            "novelty": LiveMean(seen.known)(errors),
        }
        return Rewarded(own, changed, metrics, partial(self._losses, everything, seen, targets))

    def _normalized(self, observed: Mapping[str, TensorMoments], observations: Any) -> Any:
        """Normalize observations [B, ...] to mean 0, deviation 1, and clip them."""
        leaves = {}
        for name, path in self._paths.items():
            moments, x = observed[name], at(observations, path).float()  # [B, ...]
            scale = torch.rsqrt(variance(moments) + _EPSILON)  # [...]
            apart = (x - moments["mean"].float()) * scale.float()  # [B, ...]
            leaves[path] = apart.clamp(-self.own.clip, self.own.clip)  # [B, ...]
        return replaced(observations, leaves) if leaves else observations

    @torch.no_grad()
    def _with_bonus(
        self,
        inner: Any,
        own: dict[str, Any],
        columns: Columns,
        seen: UniqueObservations,
        everything: Any,
        rewards: Tensor,
    ) -> tuple[Columns, _Targets | None]:
        """Add the bonus of intrinsic rewards [N, T] to the columns.

        Also returns the targets of the intrinsic value function, if there is one.
        """
        weight = self.own.coefficient
        if self._estimator is None:
            bonus = weight * rewards / self.config.reward_scale  # [N, T]
            return {**columns, c.REWARDS: columns[c.REWARDS] + bonus}, None
        # Intrinsic returns continue after an episode's end, in the row's next episode.
        values = self.network.in_chunks(own, everything, "values")  # [M]
        forward = self.inner.forward(inner).in_chunks()
        log_ratios, live = self._estimator.log_ratios(forward, columns)  # [N, T] both
        stream = ContinuousRows.of(live, seen, values)
        nothing = torch.zeros_like(live)  # [N, T]: nothing ever ends
        estimates = self._estimator.estimates(
            {
                c.REWARDS: stream.packed(rewards),
                c.TERMINATED: nothing,
                c.TRUNCATED: nothing,
            },
            PolicyAndValues(rewards, stream.values, stream.next_values, stream.live),
            stream.packed(log_ratios),
        )
        # Back in the order of the sample's steps.
        advantages = weight * stream.unpacked(estimates.advantages)  # [N, T]
        targets = _Targets(stream.unpacked(estimates.targets), live)
        return {**columns, EXTRA_ADVANTAGES: advantages}, targets

    def _losses(
        self,
        everything: Any,
        seen: UniqueObservations,
        targets: _Targets | None,
        own: dict[str, Any],
        part: Tensor,
        key: Tensor,
        number: int,
        trained: Tensor,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return losses of predictor and values on some steps: see `Losses`."""
        after = tree_map(lambda x: x[seen.after.flatten()[part]], everything)  # [B, ...]
        share = uniform(mixed(own["key"]) ^ 1, (len(part),))  # [B]
        counted = seen.known.flatten()[part] & (share < self.own.predictor_share)  # [B]
        errors = self.network(own, trained, after, "errors")  # [B]
        losses = [(torch.where(counted, errors, 0.0).sum(), counted.sum())]
        if targets is not None:
            before = tree_map(lambda x: x[seen.before.flatten()[part]], everything)  # [B, ...]
            aims, live = (x.flatten()[part] for x in targets)  # [B] both
            apart = aims - self.network(own, trained, before, "values")  # [B]
            losses.append((torch.where(live, 0.5 * apart.square(), 0.0).sum(), live.sum()))
        return losses


class _Targets(NamedTuple):
    """Targets of the value function of intrinsic rewards."""

    values: Tensor  # [N, T]
    live: Tensor  # [N, T] bool: the steps to learn from, without a burn-in


class Networks(nn.Module):
    """The constant network, the predictor, and a value function of intrinsic rewards."""

    def __init__(self, space: Space[Any], config: IntrinsicConfig, *, with_values: bool) -> None:
        super().__init__()
        model = ModelConfig.parse(config.model)
        self.target = _headed(space, model, config.features)
        self.predictor = _headed(space, model, config.features, hidden=True)
        if with_values:
            self.values = _headed(space, model, 1)

    def forward(self, observations: Any, part: str) -> Tensor:
        """Return the predictor's errors [B] or values [B] of normalized observations."""
        if part == "values":
            values: Tensor = self.values(observations).squeeze(-1)  # [B]
            return values
        with torch.no_grad():
            features = self.target(observations)  # [B, F]
        errors: Tensor = (self.predictor(observations) - features).square().mean(-1)  # [B]
        return errors


def _headed(
    space: Space[Any], model: ModelConfig, outputs: int, *, hidden: bool = False
) -> nn.Sequential:
    """Build encoder, optional hidden layer and linear layer -> [B, outputs]."""
    encoder = build_encoder(space, model)
    size = feature_size(encoder)
    layers: list[nn.Module] = [encoder]
    if hidden:
        layers += [initialized(nn.Linear(size, size), model.initializer), nn.ReLU()]
    return nn.Sequential(*layers, initialized(nn.Linear(size, outputs), model.initializer, 1.0))


class UniqueObservations(NamedTuple):
    """Each observation of a sample once, and indices for each step."""

    observations: Any  # [M, ...]
    before: Tensor  # [N, T] int64
    after: Tensor  # [N, T] int64; arbitrary if not known
    live: Tensor  # [N, T] bool
    known: Tensor  # [N, T] bool, live steps that do not terminate

    @classmethod
    def of(cls, columns: Columns) -> UniqueObservations:
        live = columns[c.LIVE]  # [N, T]
        before = torch.arange(live.numel(), device=live.device).view(live.shape)  # [N, T]
        if DISCOUNTS in columns:  # rows of one step each
            everything = tree_map(
                lambda x, last: torch.cat([x.flatten(0, 1), last]),
                columns[c.OBSERVATIONS],
                columns[c.LAST_OBSERVATIONS],
            )  # [N + N, ...]
            after = before + live.numel()  # [N, 1]
        else:
            everything, after = all_observations(columns), following(columns)
        return cls(everything, before, after, live, live & ~terminated(columns))


class ContinuousRows(NamedTuple):
    """Live steps of each row, concatenated across episode ends."""

    order: Tensor  # [N, T] int64: index of the step at each place
    live: Tensor  # [N, T] bool
    values: Tensor  # [N, T]
    next_values: Tensor  # [N, T]

    @classmethod
    def of(cls, live: Tensor, seen: UniqueObservations, values: Tensor) -> ContinuousRows:
        """Make it from `live` [N, T] and all observations' values [M]."""
        order = (~live).to(torch.int8).argsort(dim=1, stable=True)  # [N, T]
        places = torch.arange(live.shape[1], device=live.device)  # [T]
        count = live.sum(1, keepdim=True)  # [N, 1]
        # If the last live step terminated, the first observation of the next episode may not be in
        # the row. The return continues with the value before that step.
        after = torch.where(seen.known, seen.after, seen.before)  # [N, T]
        last = values[after].gather(1, order).gather(1, (count - 1).clamp(min=0))  # [N, 1]
        packed = values[seen.before].gather(1, order)  # [N, T]
        behind = torch.cat([packed[:, 1:], last], 1)  # [N, T]
        return cls(order, places < count, packed, torch.where(places == count - 1, last, behind))

    def packed(self, x: Tensor) -> Tensor:
        """Gather numbers [N, T] in the stream's order."""
        return x.gather(1, self.order)

    def unpacked(self, x: Tensor) -> Tensor:
        """Undo `packed`."""
        return torch.zeros_like(x).scatter(1, self.order, x)  # [N, T]


def along_rows(rewards: Tensor, live: Tensor, gamma: float) -> Tensor:
    """Return running discounted sums of rewards [N, T] -> [N, T].

    A sum starts at 0 in each row and continues across episode ends.
    """
    carried = torch.where(live, gamma, 1.0).to(rewards.dtype)  # [N, T]
    # linear_recurrence runs backwards in time.
    return linear_recurrence(
        carried.flip(1), rewards.flip(1), torch.zeros_like(rewards[:, 0])
    ).flip(1)
