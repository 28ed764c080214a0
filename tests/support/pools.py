"""Stands in for the package envpool: two small games, and walks in step or at their own pace, with
what EnvPool's are like for a caller.

Games come in the order in which they were ready, so rows are shuffled here. An action for a game
that is over begins the next one. `reset` is for all of them.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

STONES = 5
TOGETHER_STEPS = 3


class Stones:
    """Two players take one or two stones in turn. Whoever takes the last one wins 1 of the other.

    Each sees how many stones there are; who begins is drawn."""

    observation_space: Any = spaces.MultiBinary((STONES + 1,))
    action_space: Any = spaces.Discrete(2)

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        self.seed, self._random = seed, np.random.default_rng(seed)
        self.closed = False
        self._over = np.ones(num_envs, np.bool_)
        self._stones, self._player = np.zeros((2, num_envs), np.intp)
        self._steps = 0

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self._over[:] = True
        return self._begin(self._over.copy())

    def step(self, actions: Any) -> tuple[Any, ...]:
        assert actions.dtype == np.int32
        assert not self.closed
        begin = self._over.copy()  # [N]
        mover, rewards = self._player.copy(), np.zeros((len(begin), 2))  # [N], [N, 2]
        assert (~begin <= (actions < self._stones)).all(), "an illegal move"
        self._stones -= np.where(begin, 0, actions + 1)
        self._player = np.where(begin, mover, 1 - mover)
        self._over = ~begin & (self._stones == 0)
        won = np.flatnonzero(self._over)
        rewards[won, mover[won]], rewards[won, 1 - mover[won]] = 1, -1
        self._begin(begin)
        return self._told(rewards, self._over.copy())

    def close(self) -> None:
        self.closed = True

    def _begin(self, which: NDArray[np.bool_]) -> tuple[Any, dict[str, Any]]:
        self._stones[which], self._over[which] = STONES, False
        self._player[which] = self._random.integers(2, size=len(which))[which]
        observations, *_, info = self._told(np.zeros((len(which), 2)), self._over)
        return observations, info

    def _told(self, rewards: NDArray[Any], terminated: NDArray[np.bool_]) -> tuple[Any, ...]:
        env = self._random.permutation(len(terminated)).astype(np.int32)
        seen = np.eye(STONES + 1, dtype=np.bool_)[np.repeat(self._stones[env], 2)]  # [2 N, 6]
        legal = np.arange(2) < self._stones[env][:, None]  # [N, 2]
        players = {"env_id": np.repeat(env, 2), "id": np.tile([0, 1], len(env))}
        players["place"] = 10 * players["env_id"] + players["id"]
        mask = {"current_player": self._player[env], "legal_action_mask": legal}
        info = {"env_id": env, "elapsed_step": env + 100, "players": players, **mask}
        info |= {"stones": self._stones[env], "board": np.zeros((len(env), 3))}
        return seen, rewards[env].ravel(), terminated[env], np.zeros_like(terminated), info


class Together(Stones):
    """Both players choose at once, and see what each has; after some steps, they are cut off."""

    observation_space: Any = spaces.Box(0, 9, (1,), np.float32)

    def step(self, actions: Any) -> tuple[Any, ...]:
        assert {*actions} == {"env_id", "players.env_id", "players.action"}
        assert (actions["players.env_id"] == np.repeat(actions["env_id"], 2)).all()
        chosen = actions["players.action"].reshape(-1, 2).astype(float)  # [N, 2]
        begin = self._over.copy()
        chosen[begin] = 0
        self._stones -= np.where(begin, 0, 1)
        self._over = ~begin & (self._stones == STONES - TOGETHER_STEPS)
        self._begin(begin)
        return self._told(chosen, self._over.copy())

    def _told(self, rewards: NDArray[Any], over: NDArray[np.bool_]) -> tuple[Any, ...]:
        seen, rewards, truncated, terminated, info = super()._told(rewards, over)
        seen = np.repeat(self._stones[info["env_id"]], 2).astype(np.float32)[:, None]  # [2 N, 1]
        del info["current_player"], info["legal_action_mask"]
        return seen, rewards, terminated, truncated, info


class Walks:
    """One walker in each of N environments, of which `recv` has the M that are ready first.

    It sees its number and how many steps it has made, and gets its action and 0.1 for each step.
    Walks of environment i end after 3 + i % 3 steps; those of odd ones are cut off there."""

    observation_space: Any = spaces.Box(0, 99, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, num_envs: int, batch_size: int, seed: int = 0) -> None:
        self.seed, self.size, self.closed = seed, batch_size, False
        self.steps = np.zeros(num_envs, np.intp)
        self.over = np.zeros(num_envs, np.bool_)
        self._random, self._now = np.random.default_rng(seed), 0.0
        self._waiting: list[tuple[float, int, float]] = []  # when it is ready, which, its reward

    def async_reset(self) -> None:
        self.steps[:] = 0
        self._waiting = [(self._random.random(), env, 0.0) for env in range(len(self.steps))]

    def send(self, actions: Any, env_ids: Any) -> None:
        assert env_ids.dtype == np.int32
        assert len(actions) == len(env_ids) == self.size
        assert not {*env_ids.tolist()} & {env for _, env, _ in self._waiting}, (
            "it has not been told"
        )
        for env, action in zip(env_ids.tolist(), actions.tolist(), strict=True):
            begins = self.over[env]
            self.steps[env] = 0 if begins else self.steps[env] + 1
            self.over[env] = not begins and self.steps[env] == 3 + env % 3
            reward = 0.0 if begins else action + 0.1
            slow = 5 if env == 0 else 1
            self._waiting.append((self._now + slow * self._random.random(), env, reward))

    def recv(self) -> tuple[Any, ...]:
        self._waiting.sort()
        ready, self._waiting = self._waiting[: self.size], self._waiting[self.size :]
        self._now = ready[-1][0]
        env = np.array([each for _, each, _ in ready], np.int32)
        seen = np.stack([env, self.steps[env]], 1).astype(np.float32)
        rewards = np.array([reward for *_, reward in ready], np.float32)
        over, odd = self.over[env], env % 2 == 1
        info = {"env_id": env, "players": {"env_id": env}, "elapsed_step": self.steps[env] + 100}
        # A step that begins a walk tells something that is no number of an episode.
        told = np.where(self.steps[env] == 0, 1000, self.steps[env])
        info |= {"walked": told, "even": ~odd, "state": np.zeros((len(env), 2))}
        return seen, rewards, over & ~odd, over & odd, info

    def close(self) -> None:
        self.closed = True


class Strides(VectorEnv[Any, Any, Any]):
    """Walks, of which every step has all."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_observation_space: Any = Walks.observation_space
    single_action_space: Any = Walks.action_space

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        self.num_envs, self._walks = num_envs, Walks(num_envs, num_envs, seed)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self._walks.async_reset()
        seen, *_, info = self._all()
        return seen, info

    def step(self, actions: Any) -> Any:
        self._walks.send(actions, np.arange(self.num_envs, dtype=np.int32))
        return self._all()

    def close(self, **_: Any) -> None:
        self._walks.close()

    def _all(self) -> Any:
        *rows, info = self._walks.recv()
        order = info["env_id"].argsort()
        in_order = {
            name: given if isinstance(given, dict) else given[order] for name, given in info.items()
        }
        return *(each[order] for each in rows), in_order


class Pools(ModuleType):
    """The module `envpool`, with what was made of it."""

    GAMES: ClassVar = {"Stones-v1": Stones, "Together-v1": Together}
    WALKS: ClassVar = {"Walks-v1": Walks, "Strides-v1": Strides}

    def __init__(self) -> None:
        super().__init__("envpool")
        self.made: list[Any] = []

    def list_all_envs(self) -> list[str]:
        return ["Pong-v5", *self.GAMES, *self.WALKS]

    def make_spec(self, name: str) -> Any:
        return SimpleNamespace(config=SimpleNamespace(max_num_players=1 + (name in self.GAMES)))

    def make_gymnasium(self, name: str, **options: Any) -> Any:
        self.made.append({**self.GAMES, **self.WALKS}[name](**options))
        return self.made[-1]
