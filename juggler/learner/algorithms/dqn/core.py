"""DQN: Mnih et al. 2015, "Human-level control through deep reinforcement learning".

A network estimates the value Q(x, a) of each action a. EnvRunners act ε-greedily, as with PQN. A
learner keeps the steps that arrive, draws some of them for each optimizer step, and minimizes

    huber(y_t - Q(x_t, a_t))        y_t = r_t + γ r_{t+1} + … + γ^n Q'(x_{t+n}, a')

where Q' is a target network. Its parameters move a share of the way to Q's every `target_period`
optimizer steps (Lillicrap et al. 2016, "Continuous Control with Deep Reinforcement Learning"); with
a share of 1 they are copied, as in the first paper. The action a' is the best one by Q (van Hasselt
et al. 2016, "Deep Reinforcement Learning with Double Q-learning") or, without `double`, by Q'. If
the episode terminates, nothing follows the rewards. If it is truncated, and at the end of a row,
the sum is shorter and its last observation's value follows.

EnvRunners act by Q' (Schwarzer et al. 2023, "Bigger, Better, Faster"). The best action by Q changes
in many observations with each optimizer step (Schaul et al. 2022, "The Phenomenon of Policy
Churn"), so a policy by Q repeatedly collapses after it has learned a task.

The error is Huber's: squared up to 1, linear beyond. Steps drawn by priority (Schaul et al.
2016, "Prioritized Experience Replay") have importance weights, and their errors become their new
priorities.

With `atoms` in `model`, the network estimates the probabilities of returns instead of their mean,
and the loss is C51's: see `projected` and `divergence`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from juggler.learner.algorithms.dqn import DqnConfig
from juggler.learner.algorithms.off_policy.core import (
    GreedyTargetCore,
    OffPolicyCore,
    importance_weights,
    place_of,
)
from juggler.learner.core.gradient_core import Forward, Loss, TrainState
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.mean_metrics import LiveMean
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.models import RETURN_LOGITS, RETURNS
from juggler.runtime.wire.structures import tree_map


class Dqn(GreedyTargetCore, OffPolicyCore):
    """The core of DQN, for modules like PQN's."""

    name = "dqn"
    config: DqnConfig
    learns_returns = True

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        live = columns[c.LIVE]  # [N, T]
        n, t = live.shape
        rewards, discounts, following = self.led_to(columns)  # [N, T], [N, T], [N T, ...]
        observations = tree_map(lambda x: x.flatten(0, 1), columns[c.OBSERVATIONS])  # [N T, ...]
        outputs = forward({c.OBSERVATIONS: observations})
        actions = place_of(forward.module, columns[c.ACTIONS]).flatten()  # [N T]
        # The action of a step that is not live may be illegal, with the value -1e18.
        values = _of(outputs[c.ACTION_DIST_INPUTS], actions).view(n, t)  # [N, T]
        chosen = torch.where(live, values, 0.0)  # [N, T]
        with torch.no_grad():
            after, best = self._best(forward, following, state)  # {name: [N T, ...]}, [N T]
            estimates = _of(after[c.ACTION_DIST_INPUTS], best).view(n, t)  # [N, T]
            targets = torch.where(live, rewards + discounts * estimates, 0.0)  # [N, T]
        # Errors of the mean return, which are a metric for C51, too.
        mean, errors = LiveMean(live), (targets - chosen).detach().abs()  # [N, T]
        if RETURN_LOGITS in outputs:
            with torch.no_grad():
                # The target distribution is that of the action with the best mean.
                likely = _of(after[RETURN_LOGITS], best).softmax(-1)  # [N T, K]
                returns = forward.buffer(RETURNS)  # [K]
                goals = projected(likely, rewards.flatten(), discounts.flatten(), returns)
            found = divergence(_of(outputs[RETURN_LOGITS], actions), goals)
            costs = torch.where(live, found.cross_entropy.view(n, t), 0.0)  # [N, T]
            surprises = torch.where(live, found.kl.view(n, t), 0.0)  # [N, T]
        else:
            costs = smooth_l1_loss(chosen, targets, reduction="none")  # [N, T]
            surprises = errors
        # A mean over live steps: all others cost 0.
        loss = mean(costs * importance_weights(columns, costs))  # []
        with torch.no_grad():
            metrics = {
                "value_loss": loss.detach(),
                "mean_value": mean(chosen),
                "mean_error": mean(errors),
            }
        return Loss(loss, mean.live_steps, metrics, means={}, priorities=surprises.amax(1))

    def _best(
        self, forward: Forward, following: Any, state: TrainState
    ) -> tuple[dict[str, Any], Tensor]:
        """Return the target network's outputs, and the best actions [B]."""
        target = forward.using(state["extra"]["target"])
        outputs = choice = target({c.OBSERVATIONS: following})
        if self.config.double:
            choice = forward.frozen()({c.OBSERVATIONS: following})
        return outputs, choice[c.ACTION_DIST_INPUTS].argmax(-1)


def _of(x: Tensor, actions: Tensor) -> Tensor:
    """Select actions [B] from x [B, n, ...] -> [B, ...]."""
    index = actions.view(-1, *[1] * (x.ndim - 1)).expand(-1, 1, *x.shape[2:])  # [B, 1, ...]
    return x.gather(1, index).squeeze(1)


class Divergence(NamedTuple):
    """Divergence of predicted from target distributions."""

    cross_entropy: Tensor  # [B]
    kl: Tensor  # [B], without a gradient


def projected(probabilities: Tensor, rewards: Tensor, discounts: Tensor, returns: Tensor) -> Tensor:
    """Return probabilities m [B, K] of the returns one discounted reward earlier.

    As in C51 (Bellemare et al. 2017, "A Distributional Perspective on Reinforcement Learning"), a
    return that follows is clipped to the limits. Its probability is divided between the two z_j on
    either side of it; the nearer one gets more. Δ is the distance between two returns:

        m_j = Σ_i p'_i max(0, 1 - |clip(r + γ^n z_i) - z_j| / Δ)

    Args:
        probabilities: p', [B, K].
        rewards: [B]
        discounts: [B]; 0 if nothing follows.
        returns: z, [K], equally spaced.
    """
    low, high = returns[0], returns[-1]  # [] each
    moved = rewards.unsqueeze(1) + discounts.unsqueeze(1) * returns  # [B, K]
    moved = torch.minimum(torch.maximum(moved, low), high)  # [B, K]
    distances = (moved.unsqueeze(2) - returns).abs() / (returns[1] - low)  # [B, K, K] i, j
    shares = (1 - distances).clamp(min=0)  # [B, K, K]
    return (probabilities.unsqueeze(2) * shares).sum(1)  # [B, K]


def divergence(logits: Tensor, targets: Tensor) -> Divergence:
    """Return the divergence of logits [B, K] from targets m [B, K].

    The loss is the cross-entropy -Σ_j m_j log p_j. KL(m || p) differs only by the entropy of m,
    which no parameter changes. It is the priority, since it is 0 if nothing is left to learn
    (Hessel et al. 2018, "Rainbow").
    """
    cross_entropy = -(targets * logits.log_softmax(-1)).sum(-1)  # [B]
    entropy = -torch.xlogy(targets, targets).sum(-1)  # [B]
    return Divergence(cross_entropy, cross_entropy.detach() - entropy)
