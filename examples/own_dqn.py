"""An off-policy algorithm of your own, derived from DQN: Munchausen DQN.

    python examples/own_dqn.py
    juggler train --env CartPole-v1 --algorithm own_dqn:MunchausenDqn --help

The first command trains on CartPole until the mean return is 200, in about 90 seconds. The
second one shows the options of a run; call it in this directory, or with it on PYTHONPATH.

Only the loss is here (Vieillard et al. 2020, "Munchausen Reinforcement Learning"). DQN brings the
replay, the target network Q', the exploration, and their keys. With the policy π = softmax(Q' / τ),
the loss is the mean over steps of the error of Huber between Q(x, a) and

    r + α max(τ log π(a|x), l) + γ (1 - terminated) Σ_b π(b|x') (Q'(x', b) - τ log π(b|x'))

So actions that are likely already are rewarded for it, and the policy changes more slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from torch.nn.functional import smooth_l1_loss

import juggler


@dataclass(kw_only=True)
class MunchausenConfig(juggler.DqnConfig):
    """The keys of DQN, and those of the loss."""

    n_step: int = 1
    """Steps whose rewards are summed: 1, as each of them has a reward of its own by its action."""

    reward_scale: float = 0.1
    """Factor of rewards: values near 1 are learned best."""

    temperature: float = 0.03
    """How random the policy is that values are of (τ)."""

    munchausen: float = 0.9
    """How much of the logarithm of an action's probability is added to its reward (α)."""

    lowest_bonus: float = -1.0
    """The least that is added, before that factor (l)."""

    def validate(self) -> None:
        super().validate()
        if self.n_step != 1:
            raise ValueError(f"n_step = {self.n_step}: must be 1, as a bonus is that of one step")
        self.check_above("temperature", 0)
        self.check_within("munchausen", self.munchausen, 0, 1)


class MunchausenCore(juggler.Dqn):
    """Munchausen's loss; replay, target network and exploration are DQN's."""

    name = "munchausen dqn"
    config: MunchausenConfig

    def loss(
        self,
        forward: juggler.Forward,
        columns: juggler.Columns,
        state: juggler.TrainState,
    ) -> juggler.Loss:
        live, tau = columns["live"], self.config.temperature  # live: [N, T]
        rewards, discounts, following = self.led_to(columns)  # [N, T], [N, T], [N T, ...]
        seen = {"observations": columns["observations"].flatten(0, 1)}  # [N T, ...]
        actions = columns["actions"].flatten().unsqueeze(-1)  # [N T, 1]
        values = forward(seen)["action_dist_inputs"]  # [N T, n] Q(x, ·)
        chosen = values.gather(-1, actions).view_as(rewards)  # [N, T]
        with torch.no_grad():
            target = forward.using(state["extra"]["target"])
            before = target(seen)["action_dist_inputs"]  # [N T, n] Q'(x, ·)
            after = target({"observations": following})["action_dist_inputs"]  # [N T, n]
            logp = (before / tau).log_softmax(-1).gather(-1, actions).view_as(rewards)  # [N, T]
            bonus = (tau * logp).clamp(min=self.config.lowest_bonus)  # [N, T]
            # The sum over the policy's actions in x' is this logarithm.
            soft = (tau * (after / tau).logsumexp(-1)).view_as(rewards)  # [N, T]
            targets = rewards + self.config.munchausen * bonus + discounts * soft  # [N, T]
        mean = juggler.LiveMean(live)
        costs = smooth_l1_loss(chosen, targets, reduction="none")  # [N, T]
        total = mean(costs * juggler.importance_weights(columns, costs))  # []
        errors = torch.where(live, (targets - chosen).detach().abs(), 0.0)  # [N, T]
        metrics = {
            "value_loss": total.detach(),
            "mean_value": mean(chosen.detach()),
            "mean_error": mean(errors),
            "mean_bonus": mean(bonus),
        }
        priorities = errors.amax(1)  # [N] by which the replay draws, with priority_exponent
        return juggler.Loss(total, mean.live_steps, metrics, means={}, priorities=priorities)


class MunchausenDqn(juggler.Algorithm):
    """A run names this class: algorithm = "own_dqn:MunchausenDqn"."""

    config = MunchausenConfig
    core = MunchausenCore
    module = juggler.QNetwork
    action_spaces = (gymnasium.spaces.Discrete,)
    off_policy = True


if __name__ == "__main__":
    model: dict[str, Any] = {"hidden_sizes": [64, 64], "activation": "relu", "dueling": True}
    result = juggler.train(
        env="CartPole-v1",
        algorithm=MunchausenDqn,
        model=model,
        num_env_runners=1,
        envs_per_runner=8,
        fragment_steps=16,
        batch_size=128,
        lr=1e-3,
        replay_batch_size=64,
        replay_ratio=8,
        exploration_epsilon=[(0, 1.0), (5_000, 0.05)],
        stop_return=200,
        stop_steps=200_000,
    )
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
