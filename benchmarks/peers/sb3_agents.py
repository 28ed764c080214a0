"""PPO by Stable-Baselines3 with one policy for the agents of `simple_spread_v3`, beside ours in
`simple_spread.py`, with a Python of its own that has stable-baselines3 and mpe2.

Called with one JSON object: how many games run side by side, agent steps, the seed, `reward_scale`,
and `ppo`, keywords of `stable_baselines3.PPO`. Each agent of each game is an environment of the
vector that the package sees. Prints one JSON line: after each rollout, the agent steps so far and
the mean return of the last 100 episodes, summed over agents.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import Any

import numpy as np
import torch
from mpe2 import simple_spread_v3
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv


class Agents(VecEnv):
    """Games with the same agents all the time, as a vector of [games * agents] environments."""

    def __init__(self, games: int, seed: int, reward_scale: float) -> None:
        self.reward_scale = reward_scale
        self.games = [simple_spread_v3.parallel_env() for _ in range(games)]
        self.agents = self.games[0].possible_agents
        self.returns = np.zeros(games)
        self.finished: deque[float] = deque(maxlen=100)
        self.game_seeds = iter(range(1_000_000 * (seed + 1), 1_000_000 * (seed + 2)))
        first = self.agents[0]
        super().__init__(
            games * len(self.agents),
            self.games[0].observation_space(first),
            self.games[0].action_space(first),
        )

    def reset(self) -> Any:
        return np.concatenate([self._begin(game) for game in self.games])  # [N * A, ...]

    def _begin(self, game: Any) -> Any:
        return self._stacked(game.reset(seed=next(self.game_seeds))[0])

    def _stacked(self, by_agent: dict[str, Any]) -> Any:
        return np.stack([by_agent[agent] for agent in self.agents])  # [A, ...]

    def step_async(self, actions: Any) -> None:
        self.actions = actions.reshape(len(self.games), -1)  # [N, A]

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = [], [], [], []
        for number, (game, actions) in enumerate(zip(self.games, self.actions, strict=True)):
            seen, reward, terminated, truncated, _ = game.step(
                dict(zip(self.agents, map(int, actions), strict=True))
            )
            seen, reward = self._stacked(seen), self._stacked(reward)
            self.returns[number] += reward.sum()
            over = not game.agents
            info: list[dict[str, Any]] = [{} for _ in self.agents]
            if over:  # what is after a time limit counts, as the package has it
                for row, agent in enumerate(self.agents):
                    late = truncated[agent] and not terminated[agent]
                    info[row] = {"terminal_observation": seen[row], "TimeLimit.truncated": late}
                self.finished.append(self.returns[number])
                self.returns[number] = 0
                seen = self._begin(game)
            observations.append(seen)
            rewards.append(self.reward_scale * reward)  # returns above are not scaled
            dones.append(np.full(len(self.agents), over))
            infos += info
        joined = np.concatenate(observations), np.concatenate(rewards), np.concatenate(dones)
        return *joined, infos

    def close(self) -> None:
        for game in self.games:
            game.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, *_: Any) -> None:
        raise NotImplementedError

    def env_method(self, *_: Any, **__: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class Curve(BaseCallback):
    """Keeps the mean return of the last 100 episodes after each rollout."""

    def __init__(self, agents: Agents) -> None:
        super().__init__()
        self.agents = agents
        self.points: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        if self.agents.finished:
            self.points.append((self.num_timesteps, float(np.mean(self.agents.finished))))


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    agents = Agents(given["games"], given["seed"], given["reward_scale"])
    curve = Curve(agents)
    model = PPO("MlpPolicy", agents, seed=given["seed"], device="cpu", **given["ppo"])
    model.learn(given["steps"], callback=curve)
    print(json.dumps({"curve": curve.points}))


if __name__ == "__main__":
    main()
