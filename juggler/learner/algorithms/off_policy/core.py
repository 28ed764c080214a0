"""Shared parts of cores with a replay and a target network."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from juggler.learner.algorithms.off_policy import EpsilonGreedyConfig, OffPolicyConfig
from juggler.learner.core.gradient_core import (
    GradientCore,
    MakeModule,
    TrainState,
)
from juggler.learner.core.hashing import content_key, uniform
from juggler.learner.core.learner_core import Aux, Columns
from juggler.learner.core.returns import DISCOUNTS, rows_of_transitions, transitions
from juggler.learner.core.sequences import all_observations
from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS, Replay
from juggler.learner.data.sources import DataSource
from juggler.learner.optim.optimizers import Schedule
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.models import EPSILON, must_explore
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map


class TargetNetworkCore(GradientCore, ABC):
    """Base of cores with a replay and a target network.

    Its state adds the target network's parameters, and the optimizer steps since they moved.
    `steps` counts each arriving step once, however often it is drawn.
    """

    learns_from_episodes = True
    config: OffPolicyConfig

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        return {"target": parameters.clone(), "since_move": torch.zeros((), dtype=torch.int64)}

    def next_extra(self, new: TrainState, aux: Aux) -> dict[str, Tensor]:
        """Return all but the target network, which `extra_after` moves."""
        since_move = torch.where(self.target_moves(new), 0, new["extra"]["since_move"] + 1)  # []
        return {**new["extra"], "since_move": since_move}

    def extra_after(self, new: TrainState, aux: Aux, stepped: Tensor) -> dict[str, Tensor]:
        extra, target = super().extra_after(new, aux, stepped), new["extra"]["target"]  # [P]
        moves = stepped & self.target_moves(new)  # []
        if self.reads(moves):
            if moves:
                target.lerp_(new["parameters"], self.config.target_share)
            return extra
        share = moves.to(target.dtype) * self.config.target_share  # []
        return {**extra, "target": torch.lerp(target, new["parameters"], share)}  # [P]

    def target_moves(self, state: TrainState) -> Tensor:
        """Return whether the next optimizer step moves the target network, bool []."""
        return state["extra"]["since_move"] + 1 >= self.config.target_period  # []

    def replay(
        self,
        rows: Callable[[Columns], dict[str, Any]],
        seed: int,
        *,
        episodes: bool = False,
    ) -> Replay:
        """Make the configured replay; the arguments are `Replay`'s."""
        config = self.config
        return Replay(
            rows,
            capacity=config.replay_capacity,
            size=config.replay_batch_size,
            ratio=config.replay_ratio,
            begin=config.replay_begin,
            priority_exponent=config.priority_exponent,
            importance_exponent=config.importance_exponent,
            saved=config.save_replay,
            seed=seed,
            episodes=episodes,
            directory=config.replay_directory,
            memory=config.replay_memory,
        )


class OffPolicyCore(TargetNetworkCore, ABC):
    """Base of cores that learn from replayed n-step transitions."""

    def __init__(self, make_module: MakeModule, config: OffPolicyConfig) -> None:
        super().__init__(make_module, config)
        if self.module.get_initial_state():
            raise ValueError(
                f"{self.name} keeps single steps, and {type(self.module).__name__} has a state: "
                "leave out model.recurrent, or take another algorithm, such as r2d2 or ppo"
            )

    def must_keep_each_step(self, table: str) -> None:
        if self.config.n_step != 1:
            raise ValueError(
                f"{table} with n_step = {self.config.n_step}: of n steps whose rewards are summed, "
                f"{self.name} keeps the first action and the last observation alone, and each step "
                "needs a reward of its own; set n_step = 1"
            )
        if self.config.gamma == 0:
            raise ValueError(
                f"{table} with gamma = 0: {self.name} keeps no other sign of a step that ends "
                "its episode than a discount of 0, which all have then; set gamma above 0"
            )

    def data_source(self, seed: int = 0) -> DataSource:
        config = self.config
        return self.replay(partial(rows_of_transitions, n=config.n_step, gamma=config.gamma), seed)

    def led_to(self, columns: Columns) -> tuple[Tensor, Tensor, Any]:
        """Return rewards and discounts [N, T], and next observations [N T, ...].

        The n-step transitions are drawn, or from a batch of episodes. Rewards are scaled.
        """
        scale = self.config.reward_scale
        if DISCOUNTS in columns:
            rewards = columns[c.REWARDS] * scale  # [N, T]
            return rewards, columns[DISCOUNTS], columns[c.LAST_OBSERVATIONS]
        found = transitions(columns, self.config.n_step, self.config.gamma)
        everything = all_observations(columns)  # [N T + N + K, ...]
        following = tree_map(lambda x: x[found.after.flatten()], everything)  # [N T, ...]
        return found.rewards * scale, found.discounts, following


class EpsilonGreedyCore(GradientCore, ABC):
    """Base of cores that learn action values and explore ε-greedily."""

    learns_from_episodes = True
    learns_returns = False  # whether it learns the probabilities of returns

    def __init__(self, make_module: MakeModule, config: Any) -> None:
        super().__init__(make_module, config)
        self.schedules["exploration_epsilon"] = Schedule(config.exploration_epsilon)
        must_explore(self.name, self.module, self.learns_returns)

    def exploration(self, state: TrainState) -> dict[str, Tensor]:
        return {EPSILON: self.schedules["exploration_epsilon"](state["steps"])}  # []


class GreedyTargetCore(EpsilonGreedyCore, TargetNetworkCore, ABC):
    """Base of ε-greedy cores whose target network may act."""

    config: EpsilonGreedyConfig

    def acting_parameters(self, state: TrainState) -> Tensor:
        return state["extra"]["target"] if self.config.target_acts else state["parameters"]  # [P]


def place_of(module: RLModule, actions: Tensor) -> Tensor:
    """Return Discrete actions [...] as indices from 0, int64."""
    assert isinstance(module.action_space, Discrete)
    return actions.long() - int(module.action_space.start)


def action_noise(module: RLModule, key: Tensor, columns: Columns, draws: int) -> Tensor:
    """Return noise [draws, N T, M] for actions in N T observations.

    M is 0 for Discrete actions. The noise is a hash of the key and the actions, so parts of a
    sample get different noise.

    Args:
        module: chooses the actions.
        key: [] int64, different in each optimizer step.
        columns: the sample.
        draws: number of draws for each observation.
    """
    n, t = columns[c.LIVE].shape
    spec = module.action_distribution()
    if isinstance(module.action_space, Discrete):
        return torch.zeros((draws, n * t, 0), device=key.device)
    numbers = uniform(key ^ content_key(columns[c.ACTIONS]), (draws, n * t, 2, spec.noise_size))
    return spec.noise_from(numbers)  # [draws, N T, M]


def importance_weights(columns: Columns, like: Tensor) -> Tensor:
    """Return weights [N, 1] that correct the loss for prioritized draws.

    They are 1 without a replay, or if it draws uniformly.

    Args:
        columns: the sample.
        like: a tensor [N, ...] of the dtype of the loss, on its device.
    """
    weights: Tensor = columns.get(IMPORTANCE_WEIGHTS, like.new_ones(len(like)))  # [N]
    return weights.to(like.dtype).unsqueeze(1)  # [N, 1]
