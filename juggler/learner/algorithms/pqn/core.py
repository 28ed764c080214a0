"""PQN: Gallici et al. 2024, "Simplifying Deep Temporal Difference Learning".

A network estimates the value Q(x, a) of each action a. EnvRunners act ε-greedily: they take the
best action, or with probability ε any action. Targets are λ-returns. Because many environments are
sampled at once, no replay buffer is needed; because layers are normalized, no target network is.
The loss on a sample is a mean over its live steps t:

    1/2 (G_t - Q(x_t, a_t))²        G_t = r_t + γ ((1 - λ) max_a Q(x_{t+1}, a) + λ G_{t+1})

Where an episode is truncated or the row ends, G_{t+1} is max_a Q(x_{t+1}, a); where it terminates,
G_t is r_t. These are the targets of generalized advantage estimates for the values
V(x) = max_a Q(x, a).

The authors' program computes the targets of a sample once, and deals its steps out to minibatches.
Here each optimizer step is on whole rows, with targets from the newest weights.
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from juggler.learner.algorithms.actor_critic.core import actor_critic_pass
from juggler.learner.algorithms.pqn.config import PqnConfig
from juggler.learner.core.gradient_core import (
    Forward,
    GradientCore,
    Loss,
    MakeModule,
    TrainState,
)
from juggler.learner.core.learner_core import ALONE, Columns, Seam, StepOutput
from juggler.learner.core.live_mean import LiveMean
from juggler.learner.core.returns import gae
from juggler.learner.optim.schedules import Schedule
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.q_network import EPSILON, must_explore


class Pqn(GradientCore):
    """The core of PQN.

    Modules need a buffer "epsilon" to act with. In training they return the values of all actions
    as "action_dist_inputs", and the value of the best one as "values".
    """

    name = "pqn"
    learns_from_episodes = True
    config: PqnConfig

    def __init__(self, make_module: MakeModule, config: PqnConfig) -> None:
        super().__init__(make_module, config)
        self.schedules["exploration_epsilon"] = Schedule(config.exploration_epsilon)
        must_explore(self.name, self.module)

    def step(
        self, state: TrainState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[TrainState]:
        return self.step_in_parts(state, sample, seam, None, None)

    def passes(self) -> tuple[int, int]:
        return self.config.minibatches, self.config.epochs

    def exploration(self, state: TrainState) -> dict[str, Tensor]:
        return {EPSILON: self.schedules["exploration_epsilon"](state["steps"])}  # []

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        config = self.config
        values, best, next_best, live = actor_critic_pass(forward, columns)  # [N, T, n], 3 [N, T]
        mean = LiveMean(live)
        space = forward.module.action_space
        assert isinstance(space, Discrete)  # QNetwork requires it
        actions = (columns[c.ACTIONS].long() - int(space.start)).unsqueeze(-1)  # [N, T, 1]
        chosen = values.gather(-1, actions).squeeze(-1)  # [N, T] Q(x_t, a_t)
        # The action of a step that is not live may be illegal, with the value -1e18.
        chosen = torch.where(live, chosen, 0.0)  # [N, T]
        with torch.no_grad():
            returns = gae(
                rewards=columns[c.REWARDS] * config.reward_scale,
                values=best,
                next_values=next_best,
                terminated=columns[c.TERMINATED],
                truncated=columns[c.TRUNCATED],
                live=live,
                gamma=config.gamma,
                lambda_=config.lambda_,
            ).targets  # [N, T] G_t
        errors = returns - chosen  # [N, T]
        loss = 0.5 * mean(errors.square())  # []
        with torch.no_grad():
            metrics = {
                "value_loss": loss.detach(),
                "mean_value": mean(chosen),
                "explained_variance": mean.explained_variance(returns, errors),
            }
        return Loss(loss, mean.live_steps, metrics, means={})
