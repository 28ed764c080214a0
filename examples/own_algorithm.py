"""An algorithm of your own in one file, to copy.

    python examples/own_algorithm.py
    juggler train --env CartPole-v1 --algorithm own_algorithm:MyAlgorithm --help

The first command trains on CartPole for half a minute, until the mean return is 300. The second one
shows the options of a run with this algorithm; call it in this directory, or with it on PYTHONPATH.

The loss is that of PQN, "parallelised Q-network" (Gallici et al. 2024, "Simplifying Deep Temporal
Difference Learning"). It learns values Q(x, a) of actions from many environments at once, without a
replay buffer or a target network; instead, the network's layers are normalized. The loss is the
mean over steps t of

    1/2 (G_t - Q(x_t, a_t))²        G_t = r_t + γ ((1 - λ) max_a Q(x_{t+1}, a) + λ G_{t+1})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

import juggler


@dataclass(kw_only=True)
class MyConfig(juggler.LearnerConfig):
    """Keys of a run, in addition to the general ones."""

    lr: juggler.Scheduled = 1e-3
    """Learning rate. This default applies only to this algorithm."""

    grad_clip: float | None = 10.0
    """Largest norm of the gradient."""

    reward_scale: float = 0.1
    """Factor of rewards: values near 1 are learned best."""

    batch_size: int = 256
    """Environment steps in one update."""

    max_staleness: int = 4
    """Updates that weights may be behind when steps that they sampled are trained on."""

    lambda_: float = 0.65
    """How far returns look: 0 is one step, 1 the whole trajectory."""

    epsilon: juggler.Scheduled = field(default_factory=lambda: [(0, 1.0), (50_000, 0.05)])
    """Share of actions that are drawn at random: a number, or [step, value] pairs."""

    def validate(self) -> None:
        super().validate()
        self.check_within("lambda_", self.lambda_, 0, 1)
        self.check_schedule("epsilon")


class MyModule(juggler.RLModule):
    """Estimates the values of actions; acts on the largest, or at random."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        assert isinstance(action_space, gymnasium.spaces.Discrete), "this acts in a Discrete space"
        assert observation_space.shape is not None, "this observes a Box"
        units = int(model_config.get("units", 128))
        self.layers = nn.Sequential(
            nn.Linear(observation_space.shape[0], units),
            nn.LayerNorm(units),
            nn.ReLU(),
            nn.Linear(units, units),
            nn.LayerNorm(units),
            nn.ReLU(),
            nn.Linear(units, int(action_space.n)),
        )
        self.register_buffer("epsilon", torch.tensor(1.0))  # [] the learner sets it

    def _forward_inference(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"action_dist_inputs": self.layers(batch["observations"])}  # [B, n]

    def _forward_exploration(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        values = self.layers(batch["observations"])  # [B, n]
        best = nn.functional.one_hot(values.argmax(-1), values.shape[-1])  # [B, n]
        shares = self.epsilon / values.shape[-1] + (1 - self.epsilon) * best  # [B, n]
        return {"action_dist_inputs": shares.clamp(min=1e-8).log()}  # [B, n]

    def _forward_train(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        values = self.layers(batch["observations"])  # [B, n]
        return {"action_dist_inputs": values, "values": values.max(-1).values}  # [B, n], [B]


class MyCore(juggler.GradientCore):
    """The loss. GradientCore adds optimizers, schedules, checkpoints and learner groups."""

    name = "my algorithm"
    config: MyConfig

    def __init__(self, factories: Any, config: MyConfig) -> None:
        super().__init__(factories, config)
        self.schedules["epsilon"] = juggler.Schedule(config.epsilon)

    def exploration(self, state: juggler.TrainState) -> dict[str, Tensor]:
        return {"epsilon": self.schedules["epsilon"](state["steps"])}  # [] by steps trained on

    def loss(
        self,
        forward: juggler.Forward,
        columns: juggler.Columns,
        state: juggler.TrainState,
    ) -> juggler.Loss:
        # N rows of T steps: values of all actions, the largest one here and one step later.
        values, best, next_best, live = juggler.actor_critic_pass(forward, columns)
        actions = columns["actions"].unsqueeze(-1)  # [N, T, 1]
        chosen = values.gather(-1, actions).squeeze(-1)  # [N, T] Q(x_t, a_t)
        with torch.no_grad():
            returns = juggler.gae(
                rewards=columns["rewards"] * self.config.reward_scale,
                values=best,
                next_values=next_best,
                terminated=columns["terminated"],
                truncated=columns["truncated"],
                live=live,
                gamma=self.config.gamma,
                lambda_=self.config.lambda_,
            ).targets  # [N, T] G_t
        mean = juggler.LiveMean(live)
        total = 0.5 * mean((returns - chosen).square())  # []
        metrics = {"loss": total.detach(), "mean_value": mean(chosen.detach())}
        return juggler.Loss(total, mean.live_steps, metrics, means={})


class MyAlgorithm(juggler.Algorithm):
    """A run names this class: algorithm = "own_algorithm:MyAlgorithm"."""

    config = MyConfig
    core = MyCore
    module = MyModule
    action_spaces = (gymnasium.spaces.Discrete,)


if __name__ == "__main__":
    result = juggler.train(
        env="CartPole-v1",
        algorithm=MyAlgorithm,
        num_env_runners=1,
        envs_per_runner=16,
        fragment_steps=16,
        stop_return=300,
        stop_steps=1_000_000,
    )
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint, module=MyModule)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
