"""R2D2: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed RL".

A network with a memory estimates the value Q(x_1 … x_t, a) of each action a. EnvRunners act
ε-greedily. A learner keeps whole rows of steps, each with the memory's state at its start, and
draws some of them for each optimizer step. The network reads a row's episodes in order,
and the loss is a mean over their steps:

    1/2 (y_t - Q(x_t, a_t))²
    y_t = h(r_t + γ r_{t+1} + … + γ^n h⁻¹(Q'(x_{t+n}, a')))        a' = argmax_a Q(x_{t+n}, a)

where Q' is a target network, as with DQN, which reads the row in the same way, and x_t stands for
all observations up to step t. If an episode terminates, nothing follows the rewards. If it is
truncated, and at the end of a row, the sum is shorter and its last observation's value follows.

Values estimate h of returns: h(x) = sign(x) (√(|x| + 1) - 1) + ε x, with ε = 0.001. So large
returns need no reward scale (Pohlen et al. 2018, "Observe and Look Further: Achieving Consistent
Performance on Atari", section 3.2).

The state at the start of a row was made by older weights. In the first `burn_in` steps of a row
that continues an episode, both networks only update the state; nothing is learned from these steps.

A row's priority is η max_t |δ_t| + (1 - η) mean_t |δ_t|, over the errors δ = y - Q of the steps
that are learned from, with η = 0.9: a mean alone would hide a row's few important steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from juggler.learner.algorithms.off_policy.core import (
    GreedyTargetCore,
    importance_weights,
    place_of,
)
from juggler.learner.algorithms.r2d2 import R2d2Config
from juggler.learner.core.gradient_core import Forward, Loss, MakeModule, TrainState
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.mean_metrics import LiveMean
from juggler.learner.core.returns import transitions
from juggler.learner.core.sequences import Unrolled, unrolled
from juggler.learner.data.replay.table import living_rows
from juggler.learner.data.sources import DataSource
from juggler.runtime.modules import columns as c

_ETA = 0.9  # the weight of the largest error in a priority
_SCALE_EPSILON = 1e-3


class R2d2(GreedyTargetCore):
    """R2D2's core, for DQN modules with a state."""

    name = "r2d2"
    config: R2d2Config

    def __init__(self, make_module: MakeModule, config: R2d2Config) -> None:
        super().__init__(make_module, config)
        if not self.module.get_initial_state():
            raise ValueError(
                f"{self.name} trains a memory, and {type(self.module).__name__} has none: set "
                'model.recurrent = "lstm", or take another algorithm, such as dqn'
            )

    def data_source(self, seed: int = 0) -> DataSource:
        return self.replay(living_rows, seed, episodes=True)

    def loss(self, forward: Forward, columns: Columns, state: TrainState) -> Loss:
        weights = importance_weights(columns, columns[c.REWARDS])  # [N, 1]
        own = unrolled(forward, columns, self.config.burn_in)
        actions = place_of(forward.module, columns[c.ACTIONS]).unsqueeze(-1)  # [N, T, 1]
        chosen = _values(own)[own.places].gather(-1, actions).squeeze(-1)  # [N, T]
        # The action of a step that is not live may be illegal, with the value -1e18.
        chosen = torch.where(own.live, chosen, 0.0)  # [N, T]
        with torch.no_grad():
            targets = self._targets(forward, columns, state, own)  # [N, T]
        mean, errors = LiveMean(own.live), targets - chosen  # [N, T]
        loss = 0.5 * mean(errors.square() * weights)  # []
        with torch.no_grad():
            sizes = errors.abs()  # [N, T]
            steps = own.live.sum(1).clamp(min=1)  # [N]
            priorities = _ETA * sizes.amax(1) + (1 - _ETA) * sizes.sum(1) / steps  # [N]
            metrics = {
                "value_loss": loss.detach(),
                "mean_value": mean(unscaled(chosen)),
                "mean_error": mean(sizes),
            }
        return Loss(loss, mean.live_steps, metrics, means={}, priorities=priorities)

    def _targets(
        self, forward: Forward, columns: Columns, state: TrainState, own: Unrolled
    ) -> Tensor:
        """Return y_t [N, T]; 0 for steps that are not learned from."""
        config = self.config
        target = unrolled(forward.using(state["extra"]["target"]), columns, config.burn_in)
        after = own.places + 1  # [N, T]
        best = _values(own)[after].argmax(-1, keepdim=True)  # [N, T, 1] a'
        values = _values(target)[after].gather(-1, best).squeeze(-1)  # [N, T] one step later
        found = transitions(columns, config.n_step, config.gamma)
        rest = unscaled(values).flatten()[found.last]  # [N, T] n steps later
        returns = found.rewards * config.reward_scale + found.discounts * rest  # [N, T]
        return torch.where(own.live, scaled(returns), 0.0)  # [N, T]


def scaled(x: Tensor) -> Tensor:
    """Return h(x), elementwise."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + _SCALE_EPSILON * x


def unscaled(x: Tensor) -> Tensor:
    """Return h⁻¹(x), elementwise."""
    reach = x.abs() + 1 + _SCALE_EPSILON
    # (√(1 + 4 ε reach) - 1) / (2 ε), in a form with little rounding.
    root = 2 * reach / ((1 + 4 * _SCALE_EPSILON * reach).sqrt() + 1)
    return x.sign() * (root.square() - 1)


def _values(found: Unrolled) -> Tensor:
    """Return values of actions [S (L + 1), n]."""
    values: Any = found.outputs[c.ACTION_DIST_INPUTS]  # [S, L + 1, n]
    flat: Tensor = values.flatten(0, 1)
    return flat
