"""What cores share that keep what arrives: a replay, and a target network that follows."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from juggler.learner.algorithms.off_policy.config import OffPolicyConfig
from juggler.learner.core.gradient_core import (
    GradientCore,
    MakeModule,
    TrainState,
)
from juggler.learner.core.hashing import content_key, uniform
from juggler.learner.core.learner_core import Aux, Columns
from juggler.learner.core.sequences import all_observations
from juggler.learner.core.transitions import DISCOUNTS, rows_of_transitions, transitions
from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS, Replay
from juggler.learner.data.sources import DataSource
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map


class TargetNetworkCore(GradientCore, ABC):
    """The core of an algorithm that keeps what arrives, and has a target network.

    Its state also has the target network's parameters, and the optimizer steps since they moved.
    `steps` count each step that arrived once, however often it is drawn.
    """

    learns_from_episodes = True
    config: OffPolicyConfig

    def initial_extra(self, parameters: Tensor, seed: int) -> dict[str, Tensor]:
        return {"target": parameters.clone(), "since_move": torch.zeros((), dtype=torch.int64)}

    def next_extra(self, new: TrainState, aux: Aux) -> dict[str, Tensor]:
        """All but the target network, which `extra_after` moves."""
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
        """Whether the target network moves in the optimizer step that follows -> [] bool."""
        return state["extra"]["since_move"] + 1 >= self.config.target_period  # []

    def replay(
        self,
        rows: Callable[[Columns], dict[str, Any]],
        seed: int,
        *,
        episodes: bool = False,
    ) -> Replay:
        """A replay of such rows, by the keys of the config; the arguments are those of `Replay`."""
        config = self.config
        return Replay(
            rows,
            capacity=config.replay_capacity,
            size=config.replay_batch_size,
            ratio=config.replay_ratio,
            begin=config.replay_begin,
            **config.replay_rules()._asdict(),
            importance_exponent=config.importance_exponent,
            saved=config.save_replay,
            seed=seed,
            episodes=episodes,
            directory=config.replay_directory,
            memory=config.replay_memory,
        )


class OffPolicyCore(TargetNetworkCore, ABC):
    """The core of an algorithm that learns from n-step transitions, which it keeps."""

    def __init__(self, make_module: MakeModule, config: OffPolicyConfig) -> None:
        super().__init__(make_module, config)
        if self.module.get_initial_state():
            raise ValueError(
                f"{self.name} keeps single steps, and {type(self.module).__name__} has a state: "
                "leave out model.recurrent, or take another algorithm, such as r2d2 or ppo"
            )

    def must_keep_each_step(self, table: str) -> None:
        """For a core around this one that gives each step a reward of its own when it is drawn.

        Args:
            table: the keys of that core.

        Raises:
            ValueError: what is kept does not tell steps apart, or not those that terminate.
        """
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
        """Scaled sums of rewards and discounts [N, T], and observations [N T, ...], of n-step
        transitions: those that were drawn, or those of the rows of a batch of episodes."""
        scale = self.config.reward_scale
        if DISCOUNTS in columns:
            rewards = columns[c.REWARDS] * scale  # [N, T]
            return rewards, columns[DISCOUNTS], columns[c.LAST_OBSERVATIONS]
        found = transitions(columns, self.config.n_step, self.config.gamma)
        everything = all_observations(columns)  # [N T + N + K, ...]
        following = tree_map(lambda x: x[found.after.flatten()], everything)  # [N T, ...]
        return found.rewards * scale, found.discounts, following


def action_noise(module: RLModule, key: Tensor, columns: Columns, draws: int) -> Tensor:
    """Noise [draws, N T, M] for actions in N T observations; for Discrete actions, which need none,
    M is 0. It is a hash of the key and the actions: other samples get other noise, as parts of one
    do.

    Args:
        module: chooses the actions.
        key: [] int64, another one in each optimizer step.
        columns: of the sample.
        draws: how many to make for each observation.
    """
    n, t = columns[c.LIVE].shape
    spec = module.action_distribution()
    if isinstance(module.action_space, Discrete):
        return torch.zeros((draws, n * t, 0), device=key.device)
    numbers = uniform(key ^ content_key(columns[c.ACTIONS]), (draws, n * t, 2, spec.noise_size))
    return spec.noise_from(numbers)  # [draws, N T, M]


def importance_weights(columns: Columns, like: Tensor) -> Tensor:
    """The weight of each row of a sample in a loss, which makes up for rows that a replay draws
    more often than others by their priorities; 1 where it draws all alike, or there is none.

    Args:
        columns: of the sample.
        like: a tensor [N, ...] of the dtype of the loss, on its device.

    Returns:
        Weights [N, 1], for losses [N, T].
    """
    weights: Tensor = columns.get(IMPORTANCE_WEIGHTS, like.new_ones(len(like)))  # [N]
    return weights.to(like.dtype).unsqueeze(1)  # [N, 1]
