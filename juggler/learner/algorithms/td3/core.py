"""TD3 (Fujimoto et al. 2018, arXiv:1802.09477).

"Addressing Function Approximation Error in Actor-Critic Methods".

A policy π chooses one action for each observation. Two networks Q_1 and Q_2 estimate the value of
an action. A learner keeps the steps that arrive, draws some of them for each optimizer step, and
minimizes the sum of

    ½ (y_t - Q_i(x_t, a_t))²  for both i    y_t = r_t + … + γ^(n-1) r_{t+n-1}
                                                  + γ^n min_i Q'_i(x_{t+n}, a')
    -Q_1(x_t, π(x_t))                       a' = clip(π'(x_{t+n}) + clip(ε, -c, c)), ε normal

where π' and Q' are target networks, which follow the trained ones. In the paper n is 1. The
first term trains Q, the second π. They have no parameters in common.

The policy moves every `policy_period` optimizer steps, and so do the target networks. In between,
neither its parameters nor their optimizer moments change. The noise ε is a hash of the
sample and of a key that counts optimizer steps. All noise is in units of half the distance between
an action's bounds, and actions are clipped to these bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from juggler.learner.algorithms.off_policy.core import (
    OffPolicyCore,
    action_noise,
    importance_weights,
)
from juggler.learner.algorithms.td3 import Td3Config
from juggler.learner.core.gradient_core import (
    Forward,
    Loss,
    MakeModule,
    TrainState,
)
from juggler.learner.core.learner_core import Aux, Columns
from juggler.learner.core.mean_metrics import LiveMean
from juggler.learner.optim.optimizers import Schedule, chosen
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.distributions.base import ClippedGaussian, Constants
from juggler.runtime.modules.models import (
    EXPLORATION_NOISE,
    Q_VALUES,
    DeterministicActorCritic,
)
from juggler.runtime.wire.structures import tree_map


class Td3(OffPolicyCore):
    """The core of TD3, for modules like `DeterministicActorCritic`.

    Its state also has a key that determines the noise, and the optimizer steps since the policy
    moved.
    """

    name = "td3"
    config: Td3Config
    counts_each = True

    def __init__(self, make_module: MakeModule, config: Td3Config) -> None:
        super().__init__(make_module, config)
        self.schedules["exploration_noise"] = Schedule(config.exploration_noise)
        if not isinstance(self.module, DeterministicActorCritic):
            raise ValueError(
                "td3 needs a module that chooses one action and values it twice, such as "
                "DeterministicActorCritic or what derives from it, not a "
                f"{type(self.module).__name__}"
            )
        critics = self.flat.training_only()
        self._of_critics = Constants(np.array([name in critics for name in self.flat.sizes]))  # [K]

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        return {
            **super().initial_extra(parameters, seed),
            "since_policy_move": torch.zeros((), dtype=torch.int64),  # []
            "key": torch.tensor(seed % 2**32),  # []
        }

    def moving(self, state: TrainState, live_steps: Tensor) -> Tensor:
        (of_critics,) = self._of_critics.on(state["parameters"].device)  # [K]
        return super().moving(state, live_steps) & (of_critics | self._policy_moves(state))

    def decided(self, state: TrainState) -> bool | None:
        moves = self._policy_moves(state)  # []
        return bool(moves) if self.reads(moves) else None

    def next_extra(self, new: TrainState, aux: Aux) -> dict[str, Tensor]:
        old, moves = new["extra"], self._policy_moves(new)  # []
        return {
            **chosen(moves, super().next_extra(new, aux), old),
            "since_policy_move": torch.where(moves, 0, old["since_policy_move"] + 1),  # []
            "key": (old["key"] + 1) % 2**32,  # []
        }

    def target_moves(self, state: TrainState) -> Tensor:
        return super().target_moves(state) & self._policy_moves(state)  # []

    def exploration(self, state: TrainState) -> dict[str, Tensor]:
        return {EXPLORATION_NOISE: self.schedules["exploration_noise"](state["steps"])}  # []

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        live = columns[c.LIVE]  # [N, T]
        n, t = live.shape
        rewards, discounts, following = self.led_to(columns)  # [N, T], [N, T], [N T, ...]
        observations = tree_map(lambda x: x.flatten(0, 1), columns[c.OBSERVATIONS])  # [N T, ...]
        # y_t, smoothed by noise, of the smaller of both values.
        with torch.no_grad():
            target = forward.using(state["extra"]["target"])
            key, most = state["extra"]["key"], self.config.target_noise_clip  # []
            (normal,) = action_noise(forward.module, key, columns, draws=1)  # [N T, M]
            noise = (self.config.target_noise * normal).clamp(-most, most)  # [N T, M]
            after = _values(target, following, _policy(target, following).moved(noise))  # [N T, 2]
            best = after.amin(-1).view(n, t)  # [N, T]
            targets = torch.where(live, rewards + discounts * best, 0.0)  # [N, T]
        values = _values(forward, observations, columns[c.ACTIONS].flatten(0, 1))  # [N T, 2]
        values = torch.where(live.unsqueeze(-1), values.view(n, t, 2), 0.0)  # [N, T, 2]
        errors = targets.unsqueeze(-1) - values  # [N, T, 2]
        mean = LiveMean(live)
        value_loss = mean(0.5 * errors.square().sum(-1) * importance_weights(columns, values))  # []
        total, of_policy, moves = value_loss, {}, self._policy_moves(state)  # []
        if not self.reads(moves) or moves:
            # Gradients flow through the values of actions to the policy, and do not change Q.
            critic = forward.frozen()
            actions = _policy(forward, observations).mode()  # [N T, ...]
            gain = _values(critic, observations, actions)[:, 0].view(n, t)  # [N, T]
            policy_loss = -mean(torch.where(live, gain, 0.0))  # []
            # A gradient that moves no parameter must not count in the norm that grad_clip limits.
            total = value_loss + torch.where(moves, policy_loss, 0.0)  # []
            of_policy["policy_loss"] = policy_loss.detach()
        with torch.no_grad():
            metrics = {
                "value_loss": value_loss.detach(),
                **of_policy,
                "mean_value": mean(values.mean(-1)),
            }
        priorities = errors.detach().abs().mean(-1).amax(1)  # [N]
        return Loss(total, mean.live_steps, metrics, means={}, priorities=priorities)

    def _policy_moves(self, state: TrainState) -> Tensor:
        """Return whether the next optimizer step moves the policy, bool []."""
        return state["extra"]["since_policy_move"] + 1 >= self.config.policy_period  # []


def _policy(forward: Forward, observations: Any) -> ClippedGaussian:
    """Return a policy's action distribution in observations [B, ...]."""
    inputs = forward({c.OBSERVATIONS: observations})[c.ACTION_DIST_INPUTS]  # [B, 2 M]
    module = forward.module
    assert isinstance(module, DeterministicActorCritic)  # checked by Td3.__init__
    return module.action_distribution()(inputs)


def _values(forward: Forward, observations: Any, actions: Tensor) -> Tensor:
    """Return both values [B, 2] of actions [B, ...]."""
    values: Tensor = forward({c.OBSERVATIONS: observations, c.ACTIONS: actions})[Q_VALUES]
    return values  # [B, 2]
