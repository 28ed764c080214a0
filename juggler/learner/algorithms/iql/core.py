"""IQL, implicit Q-learning (Kostrikov et al. 2021).

"Offline Reinforcement Learning with Implicit Q-Learning".

Only values of actions in the data set are used. With u = min Q'(x, a) - V(x), where two target
networks Q' value the action a taken in x, and x' is the next observation, the loss is a mean over
steps of the data set:

    value     |τ - 1(u < 0)| u²                             (equation 5: the expectile τ of Q')
    critics   1/2 Σ_i (r + γ V(x') - Q_i(x, a))²            (equation 6)
    policy    - min(exp(β u), 100) log π(a|x)               (equation 7)
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from juggler.learner.algorithms.iql import IqlConfig
from juggler.learner.algorithms.off_policy.core import (
    OffPolicyCore,
    importance_weights,
    place_of,
)
from juggler.learner.core.gradient_core import Forward, Loss, TrainState
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.mean_metrics import LiveMean
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.models import Q_VALUES
from juggler.runtime.modules.rl_module import Batch
from juggler.runtime.wire.structures import tree_map

_MAX_WEIGHT = 100.0  # of an action in the policy's loss


class Iql(OffPolicyCore):
    """IQL's core, for modules with a policy, values and two critics."""

    name = "iql"
    config: IqlConfig

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        config, live = self.config, columns[c.LIVE]  # [N, T]
        n, t = live.shape
        rewards, discounts, following = self.led_to(columns)  # [N, T], [N, T], [N T, ...]
        taken: Batch = {
            name: tree_map(lambda x: x.flatten(0, 1), columns[name])
            for name in (c.OBSERVATIONS, c.ACTIONS)
        }  # [N T, ...] each
        outputs = forward({c.OBSERVATIONS: taken[c.OBSERVATIONS]})
        values = outputs[c.VALUES].view(n, t)  # [N, T]
        with torch.no_grad():
            target = forward.using(state["extra"]["target"])
            by_target = _of_taken(target, taken).amin(-1).view(n, t)  # [N, T]
            frozen = forward.frozen()
            after = frozen({c.OBSERVATIONS: following})[c.VALUES].view(n, t)  # [N, T]
            targets = rewards + discounts * after  # [N, T]
        # Steps that are not live may have any action, so their errors are masked.
        gains = torch.where(live, by_target - values, 0.0)  # [N, T] u
        errors = torch.where(
            live.unsqueeze(-1), targets.unsqueeze(-1) - _of_taken(forward, taken).view(n, t, 2), 0.0
        )  # [N, T, 2]
        policy = forward.module.action_distribution()(outputs[c.ACTION_DIST_INPUTS])  # [N T]
        logp = policy.log_prob(taken[c.ACTIONS]).view(n, t)  # [N, T]
        chosen = (config.advantage_weight * gains.detach()).exp().clamp(max=_MAX_WEIGHT)  # [N, T]
        mean, weights = LiveMean(live), importance_weights(columns, values)  # [N, 1]
        value_loss = mean(expectile_loss(gains, config.expectile) * weights)  # []
        critic_loss = mean(0.5 * errors.square().sum(-1) * weights)  # []
        # The log-probability of a step that is not live may be anything.
        policy_loss = -mean(torch.where(live, chosen * logp, 0.0) * weights)  # []
        with torch.no_grad():
            metrics = {
                "value_loss": value_loss.detach(),
                "critic_loss": critic_loss.detach(),
                "policy_loss": policy_loss.detach(),
                "mean_value": mean(torch.where(live, values, 0.0)),
                "mean_advantage": mean(gains),
            }
        priorities = errors.detach().abs().mean(-1).amax(1)  # [N]
        total = value_loss + critic_loss + policy_loss  # []
        return Loss(total, mean.live_steps, metrics, means={}, priorities=priorities)


def expectile_loss(gains: Tensor, expectile: float) -> Tensor:
    """Return |τ - 1(u < 0)| u² for each u [...]."""
    return torch.where(gains < 0, 1 - expectile, expectile) * gains.square()  # [...]


def _of_taken(forward: Forward, taken: Batch) -> Tensor:
    """Return both values [B, 2] of the actions taken."""
    values: Tensor = forward(taken)[Q_VALUES]  # [B, 2], or [B, 2, n]
    if not isinstance(forward.module.action_space, Discrete):
        return values
    places = place_of(forward.module, taken[c.ACTIONS]).view(-1, 1, 1).expand(-1, 2, 1)
    return values.gather(-1, places).squeeze(-1)  # [B, 2]
