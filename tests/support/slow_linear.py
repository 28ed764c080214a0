"""PPO's and APPO's losses for a linear module, step by step in float64 NumPy, and gradients of any
loss by differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from juggler.learner.algorithms.appo.config import AppoConfig
from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.rl_module import Batch, RLModule

Array = NDArray[np.float64]
#: A linear module's parameters by name, in float64.
Weights = dict[str, Array]
Place = tuple[int, int]


class Linear(RLModule):
    """Four numbers to two logits and a value."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.policy = torch.nn.Linear(4, 2)
        self.value = torch.nn.Linear(4, 1)

    def _forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        observations = batch["observations"]  # [B, 4]
        return {
            "action_dist_inputs": self.policy(observations),
            "values": self.value(observations).squeeze(-1),
        }


def weights_of(named: Mapping[str, torch.Tensor]) -> Weights:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in named.items()}


def log_probs(weights: Weights, observation: Any) -> Array:
    logits = weights["policy.weight"] @ observation.astype(float) + weights["policy.bias"]  # [2]
    return logits - np.log(np.exp(logits).sum())


def value(weights: Weights, observation: Any) -> float:
    return float((weights["value.weight"] @ observation.astype(float) + weights["value.bias"])[0])


def observation_after(batch: EpisodeBatch, n: int, t: int) -> Any:
    """What a step led to, unless it terminated."""
    for k, (row, step) in enumerate(zip(batch.final_rows, batch.final_steps, strict=True)):
        if (row, step) == (n, t):
            return batch.final_observations[k]
    return batch.observations[n, t + 1] if t + 1 < batch.steps else batch.last_observations[n]


def live_places(batch: EpisodeBatch) -> list[Place]:
    return [(int(n), int(t)) for n, t in np.argwhere(batch.live)]


def gae(
    weights: Weights, batch: EpisodeBatch, config: PpoConfig
) -> tuple[dict[Place, float], dict[Place, float]]:
    """Advantages, not normalized, and targets of live steps."""
    advantages: dict[Place, float] = {}
    for n, t in reversed(live_places(batch)):
        gamma = 0.0 if batch.terminated[n, t] else config.gamma
        after = value(weights, observation_after(batch, n, t))
        here = value(weights, batch.observations[n, t])
        delta = float(batch.rewards[n, t]) * config.reward_scale + gamma * after - here
        ends = batch.terminated[n, t] or batch.truncated[n, t]
        later = 0.0 if ends else advantages.get((n, t + 1), 0.0)
        advantages[n, t] = delta + gamma * config.lambda_ * later
    targets = {
        place: each + value(weights, batch.observations[place])
        for place, each in advantages.items()
    }
    return advantages, targets


def ppo_loss(new: Weights, old: Weights, batch: EpisodeBatch, config: PpoConfig) -> float:
    """With the weights `new`, where the update began with `old`."""
    advantages, targets = gae(old, batch, config)
    raw = np.array(list(advantages.values()))
    losses = []
    for n, t in live_places(batch):
        advantage = advantages[n, t]
        if config.normalize_advantages:
            advantage = (advantage - raw.mean()) / raw.std()
        observation = batch.observations[n, t]
        logp = log_probs(new, observation)  # [2]
        ratio = np.exp(logp[batch.actions[n, t]] - batch.action_logp[n, t])
        near = np.clip(ratio, 1 - config.clip, 1 + config.clip)
        square = (value(new, observation) - targets[n, t]) ** 2
        if config.value_clip is not None:
            before = value(old, observation)
            moved = np.clip(value(new, observation) - before, -config.value_clip, config.value_clip)
            square = max(square, (before + moved - targets[n, t]) ** 2)
        losses.append(
            -min(ratio * advantage, near * advantage)
            + config.value_coefficient * 0.5 * square
            - float(config.entropy_coefficient) * -(np.exp(logp) * logp).sum()  # type: ignore[arg-type]
        )
    return float(np.mean(losses))


def appo_loss(
    new: Weights, target: Weights, batch: EpisodeBatch, config: AppoConfig, beta: float = 0.0
) -> float:
    """With the weights `new` and those of the target network, and weight β of their distance."""
    losses = []
    correction_after: dict[Place, float] = {}  # v_t - V'(x_t)
    for n, t in reversed(live_places(batch)):
        gamma = 0.0 if batch.terminated[n, t] else config.gamma
        observation, action = batch.observations[n, t], batch.actions[n, t]
        here, after = value(target, observation), value(target, observation_after(batch, n, t))
        behaviour = float(batch.action_logp[n, t])
        weight = np.exp(log_probs(target, observation)[action] - behaviour)
        ends = batch.terminated[n, t] or batch.truncated[n, t]
        later = 0.0 if ends else correction_after.get((n, t + 1), 0.0)
        reward = float(batch.rewards[n, t]) * config.reward_scale
        error = reward + gamma * after - here
        correction_after[n, t] = (
            min(config.rho_bar, weight) * error
            + gamma * config.lambda_ * min(config.c_bar, weight) * later
        )
        advantage = min(config.rho_bar_pg, weight) * (error + gamma * later)
        logp = log_probs(new, observation)  # [2]
        ratio = min(config.behaviour_clip, 1 / weight) * np.exp(logp[action] - behaviour)
        near = np.clip(ratio, 1 - config.clip, 1 + config.clip)
        goal = here + correction_after[n, t]
        target_logp = log_probs(target, observation)  # [2]
        losses.append(
            -min(ratio * advantage, near * advantage)
            + config.value_coefficient * 0.5 * (goal - value(new, observation)) ** 2
            - float(config.entropy_coefficient) * -(np.exp(logp) * logp).sum()  # type: ignore[arg-type]
            + beta * (np.exp(target_logp) * (target_logp - logp)).sum()
        )
    return float(np.mean(losses))


def gradient(loss: Callable[[Weights], float], weights: Weights, size: float = 1e-6) -> Weights:
    """Of a loss, by central differences."""
    found = {}
    for name, array in weights.items():
        slopes = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            moved = []
            for step in (size, -size):
                others = {key: each.copy() for key, each in weights.items()}
                others[name][index] += step
                moved.append(loss(others))
            slopes[index] = (moved[0] - moved[1]) / (2 * size)
        found[name] = slopes
    return found
