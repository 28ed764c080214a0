"""DQN: Mnih et al. 2015, "Human-level control through deep reinforcement learning".

A network estimates the value Q(x, a) of each action a. EnvRunners act ε-greedily, as with PQN. A
learner keeps the steps that arrive, draws some of them for each optimizer step, and minimizes

    huber(y_t - Q(x_t, a_t))        y_t = r_t + γ r_{t+1} + … + γ^n Q'(x_{t+n}, a')

where Q' is a target network, a copy of the parameters that moves every `target_period` optimizer
steps. The action a' is the best one by Q (van Hasselt et al. 2016, "Deep Reinforcement Learning
with Double Q-learning") or, without `double`, by Q'. Where the episode terminates, nothing follows
the rewards. Where it is truncated, and at the end of a row, the sum is shorter and its last
observation's value follows.

The error is that of Huber: squared up to 1, linear beyond. Steps drawn by priority (Schaul et al.
2016, "Prioritized Experience Replay") have importance weights, and their errors become their new
priorities.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Discrete
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.learner.core.gradient_core import (
    Factories,
    Forward,
    GradientCore,
    Loss,
    ParameterGroupState,
    State,
)
from juggler.learner.core.learner_core import (
    ALONE,
    Columns,
    GradientAux,
    Sample,
    Seam,
    StepOutput,
)
from juggler.learner.core.live_mean import LiveMean
from juggler.learner.core.sequences import all_observations
from juggler.learner.core.transitions import DISCOUNTS, rows_of_transitions, transitions
from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS, NEW_STEPS, Replay
from juggler.learner.data.sources import DataSource
from juggler.learner.optim.optimizers import Schedule
from juggler.learner.optim.parameter_group_state import with_steps
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.q_network import EPSILON, must_explore
from juggler.runtime.wire.structures import tree_map


class Dqn(GradientCore):
    """The core of DQN, for modules like those of PQN.

    A parameter group also keeps the target network's parameters, and the optimizer steps since they
    moved. Its `steps` count each step that arrived once, however often it is drawn.
    """

    name = "dqn"
    learns_from_episodes = True
    config: DqnConfig

    def __init__(self, factories: Factories, config: DqnConfig) -> None:
        super().__init__(factories, config)
        self.schedules["exploration_epsilon"] = Schedule(config.exploration_epsilon)
        for module_id, module in self.modules.items():
            must_explore(self.name, module_id, module)
            if module.get_initial_state():
                raise ValueError(
                    f"dqn keeps single steps, and module {module_id!r}, {type(module).__name__}, "
                    "has a state: leave out model.recurrent, or take pqn"
                )

    def data_source(self, seed: int = 0) -> DataSource:
        config = self.config
        return Replay(
            partial(rows_of_transitions, n=config.n_step, gamma=config.gamma),
            capacity=config.replay_capacity,
            size=config.replay_batch_size,
            ratio=config.replay_ratio,
            begin=config.replay_begin,
            priority_exponent=config.priority_exponent,
            importance_exponent=config.importance_exponent,
            saved=config.save_replay,
            seed=seed,
        )

    def step(self, state: State, sample: Sample, seam: Seam = ALONE) -> StepOutput[State]:
        before = {group_id: own["steps"].clone() for group_id, own in state.items()}  # [] each
        output = super().step(state, sample, seam)
        steps = {}  # [] each
        for group_id, group in self._groups.items():
            own = [sample[key] for key in group.modules if key in sample]
            new = [columns[NEW_STEPS] for columns in own if NEW_STEPS in columns]  # [] each
            if new:
                steps[group_id] = before[group_id] + torch.stack(new).max()
        return output._replace(state=with_steps(output.state, steps))

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        return {"target": parameters.clone(), "since_move": torch.zeros((), dtype=torch.int64)}

    def next_extra(self, new: ParameterGroupState, aux: GradientAux) -> dict[str, Tensor]:
        target, since_move = new["extra"]["target"], new["extra"]["since_move"] + 1  # [P], []
        due = since_move >= self.config.target_period  # []
        moved = torch.lerp(target, new["parameters"], self.config.target_share)  # [P]
        return {
            "target": torch.where(due, moved, target),  # [P]
            "since_move": torch.where(due, 0, since_move),  # []
        }

    def loss(self, forward: Forward, columns: Columns, state: ParameterGroupState) -> Loss:
        live = columns[c.LIVE]  # [N, T]
        n, t = live.shape
        rewards, discounts, following = self._led_to(columns)  # [N, T], [N, T], [N T, ...]
        observations = tree_map(lambda x: x.flatten(0, 1), columns[c.OBSERVATIONS])  # [N T, ...]
        values = forward({c.OBSERVATIONS: observations})[c.ACTION_DIST_INPUTS]  # [N T, n]
        space = forward.module.action_space
        assert isinstance(space, Discrete)  # QNetwork requires it
        actions = (columns[c.ACTIONS].long() - int(space.start)).view(-1, 1)  # [N T, 1]
        # The action of a step that is not live may be illegal, with the value -1e30.
        chosen = torch.where(live, values.gather(-1, actions).view(n, t), 0.0)  # [N, T]
        with torch.no_grad():
            best = self._best_values(forward, following, state).view(n, t)  # [N, T]
            targets = rewards * self.config.reward_scale + discounts * best  # [N, T]
            targets = torch.where(live, targets, 0.0)  # [N, T]
        weights = columns.get(IMPORTANCE_WEIGHTS, live.new_ones(n, dtype=chosen.dtype))  # [N]
        mean, errors = LiveMean(live), targets - chosen  # [N, T]
        costs = smooth_l1_loss(chosen, targets, reduction="none")  # [N, T]
        loss = mean(costs * weights.to(costs.dtype).unsqueeze(1))  # []
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

    def _led_to(self, columns: Columns) -> tuple[Tensor, Tensor, Any]:
        """Sums of rewards and discounts [N, T], and observations [N T, ...], of n-step transitions:
        those that were drawn, or those of the rows of a batch of episodes."""
        if DISCOUNTS in columns:
            return columns[c.REWARDS], columns[DISCOUNTS], columns[c.LAST_OBSERVATIONS]
        found = transitions(columns, self.config.n_step, self.config.gamma)
        everything = all_observations(columns)  # [N T + N + K, ...]
        following = tree_map(lambda x: x[found.after.flatten()], everything)  # [N T, ...]
        return found.rewards, found.discounts, following

    def _best_values(self, forward: Forward, following: Any, state: ParameterGroupState) -> Tensor:
        """The target network's value [B] of the best action in each observation."""
        buffers = {name: buffer.clone() for name, buffer in state["buffers"].items()}
        target = forward._replace(parameters=state["extra"]["target"], buffers=buffers)
        values: Tensor = target({c.OBSERVATIONS: following})[c.ACTION_DIST_INPUTS]  # [B, n]
        if not self.config.double:
            return values.max(-1).values  # [B]
        buffers = {name: buffer.clone() for name, buffer in state["buffers"].items()}
        choice = forward._replace(buffers=buffers)({c.OBSERVATIONS: following})
        best = choice[c.ACTION_DIST_INPUTS].argmax(-1, keepdim=True)  # [B, 1]
        return values.gather(-1, best).squeeze(-1)  # [B]
