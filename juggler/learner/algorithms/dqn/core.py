"""DQN: Mnih et al. 2015, "Human-level control through deep reinforcement learning".

A network estimates the value Q(x, a) of each action a. EnvRunners act ε-greedily, as with PQN. A
learner keeps the steps that arrive, draws some of them for each optimizer step, and minimizes

    huber(y_t - Q(x_t, a_t))        y_t = r_t + γ r_{t+1} + … + γ^n Q'(x_{t+n}, a')

where Q' is a target network. Its parameters move a share of the way to those of Q every
`target_period` optimizer steps (Lillicrap et al. 2016, "Continuous Control with Deep Reinforcement
Learning"); with a share of 1 they are copied, as in the first paper. The action a' is the best one
by Q (van Hasselt et al. 2016, "Deep Reinforcement Learning with Double Q-learning") or, without
`double`, by Q'. Where the episode terminates, nothing follows the rewards. Where it is truncated,
and at the end of a row, the sum is shorter and its last observation's value follows.

EnvRunners act by Q' (Schwarzer et al. 2023, "Bigger, Better, Faster"). The best action by Q changes
in many observations with each optimizer step (Schaul et al. 2022, "The Phenomenon of Policy
Churn"), and so a policy by Q falls again and again after it has learned a task.

The error is that of Huber: squared up to 1, linear beyond. Steps drawn by priority (Schaul et al.
2016, "Prioritized Experience Replay") have importance weights, and their errors become their new
priorities.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Discrete
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.learner.algorithms.off_policy.core import (
    OffPolicyCore,
    importance_weights,
    with_parameters,
)
from juggler.learner.core.gradient_core import Factories, Forward, Loss, ParameterGroupState
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.live_mean import LiveMean
from juggler.learner.optim.optimizers import Schedule
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.q_network import EPSILON, must_explore
from juggler.runtime.wire.structures import tree_map


class Dqn(OffPolicyCore):
    """The core of DQN, for modules like those of PQN."""

    name = "dqn"
    config: DqnConfig

    def __init__(self, factories: Factories, config: DqnConfig) -> None:
        super().__init__(factories, config)
        self.schedules["exploration_epsilon"] = Schedule(config.exploration_epsilon)
        for module_id, module in self.modules.items():
            must_explore(self.name, module_id, module)

    def acting_parameters(self, state: ParameterGroupState) -> Tensor:
        return state["extra"]["target"] if self.config.target_acts else state["parameters"]  # [P]

    def loss(self, forward: Forward, columns: Columns, state: ParameterGroupState) -> Loss:
        live = columns[c.LIVE]  # [N, T]
        n, t = live.shape
        rewards, discounts, following = self.led_to(columns)  # [N, T], [N, T], [N T, ...]
        observations = tree_map(lambda x: x.flatten(0, 1), columns[c.OBSERVATIONS])  # [N T, ...]
        values = forward({c.OBSERVATIONS: observations})[c.ACTION_DIST_INPUTS]  # [N T, n]
        space = forward.module.action_space
        assert isinstance(space, Discrete)  # QNetwork requires it
        actions = (columns[c.ACTIONS].long() - int(space.start)).view(-1, 1)  # [N T, 1]
        # The action of a step that is not live may be illegal, with the value -1e30.
        chosen = torch.where(live, values.gather(-1, actions).view(n, t), 0.0)  # [N, T]
        with torch.no_grad():
            best = self._best_values(forward, following, state).view(n, t)  # [N, T]
            targets = torch.where(live, rewards + discounts * best, 0.0)  # [N, T]
        mean, errors = LiveMean(live), targets - chosen  # [N, T]
        costs = smooth_l1_loss(chosen, targets, reduction="none")  # [N, T]
        loss = mean(costs * importance_weights(columns, costs))  # []
        epsilon = self.schedules["exploration_epsilon"](state["steps"])  # []
        forward.set_buffer(EPSILON, epsilon)
        with torch.no_grad():
            metrics = {
                "value_loss": loss.detach(),
                "mean_value": mean(chosen),
                "mean_error": mean(errors.abs()),
                "epsilon": epsilon,
            }
        priorities = errors.detach().abs().amax(1)  # [N]
        return Loss(loss, mean.live_steps, metrics, means={}, priorities=priorities)

    def _best_values(self, forward: Forward, following: Any, state: ParameterGroupState) -> Tensor:
        """The target network's value [B] of the best action in each observation."""
        target = with_parameters(forward, state["extra"]["target"])
        values: Tensor = target({c.OBSERVATIONS: following})[c.ACTION_DIST_INPUTS]  # [B, n]
        if not self.config.double:
            return values.max(-1).values  # [B]
        choice = with_parameters(forward, forward.parameters)({c.OBSERVATIONS: following})
        best = choice[c.ACTION_DIST_INPUTS].argmax(-1, keepdim=True)  # [B, 1]
        return values.gather(-1, best).squeeze(-1)  # [B]
