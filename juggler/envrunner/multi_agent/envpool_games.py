"""EnvPool's games for several players, which C++ threads step together. No torch here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from juggler.envrunner.environments.envpool import (
    SCHEME,
    check_options,
    given_numbers,
    make_pool,
    number_of_agents,
)
from juggler.envrunner.environments.extras import check_extra
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv, VectorStep
from juggler.runtime.wire.trees import Tree

Bools = NDArray[np.bool_]


def find_game(name: str) -> Callable[..., EnvPoolGame]:
    """Find what makes a game of EnvPool.

    Args:
        name: "envpool:GAME-vN", such as "envpool:ConnectFour-v1".

    Raises:
        ValueError: EnvPool is not installed.
    """
    check_extra(name)
    return functools.partial(EnvPoolGame, name.removeprefix(SCHEME))


class EnvPoolGame(MultiAgentVectorEnv):
    """N games of EnvPool. Their players are the agents "player_0", "player_1" and so on.

    In a game of turns, the one on turn sees {"observation": ..., "action_mask": int8 [n]}, or its
    observation alone where the game has no mask. In the other games, everybody acts in every step.
    A game begins with the step after its end, as EnvPool has it.

    Args:
        name: of the game, such as "ConnectFour-v1".
        num_envs: N.
        options: of `envpool.make`, such as max_episode_steps.

    Raises:
        ValueError: an option is one that Juggler sets.
        EnvironmentFailed: EnvPool cannot make the game.
    """

    autoreset_mode = AutoresetMode.NEXT_STEP

    def __init__(self, name: str, num_envs: int = 1, **options: Any) -> None:
        check_options(options)
        self._name, self._options = name, options
        self.num_envs = num_envs
        self.agents = tuple(f"player_{i}" for i in range(number_of_agents(name)))
        self._pool = make_pool(name, num_envs, options)
        self.action_space = self._pool.action_space
        observed = self._pool.observation_space
        _, info = self._pool.reset()
        self._masked = "legal_action_mask" in info
        if self._masked:
            size = info["legal_action_mask"].shape[1]
            mask = spaces.Box(0, 1, (size,), np.int8)
            observed = spaces.Dict(observation=observed, action_mask=mask)
        self.observation_space = observed
        self._envs = np.arange(num_envs, dtype=np.int32)
        self._shape = (num_envs, len(self.agents))  # [N, A]

    def reset(self, seed: int | None, which: Bools) -> tuple[Tree, Bools]:
        if seed is not None:  # EnvPool takes one only when it makes games
            self._pool.close()
            self._pool = make_pool(
                self._name, self.num_envs, {**self._options, "seed": seed % 2**31}
            )
        observations, info = self._pool.reset()
        return self._read(observations, info)

    def step(self, actions: Any) -> VectorStep:
        observations, rewards, terminated, truncated, info = self._pool.step(self._sent(actions))
        seen, acting = self._read(observations, info)
        env = info["env_id"]  # [N]
        by_itself, cut = np.zeros((2, *self._shape), np.bool_)  # [N, A] each
        by_itself[env], cut[env] = terminated[:, None], truncated[:, None]
        acting &= ~(by_itself | cut)
        infos = self._numbers(info)
        return VectorStep(seen, self._by_agent(rewards, info), by_itself, cut, acting, infos)

    def close(self) -> None:
        self._pool.close()

    def _sent(self, actions: NDArray[Any]) -> Any:
        """What EnvPool takes of the choices [N, A] of all players."""
        actions = actions.astype(np.int32)
        if self._in_turns:
            return actions[self._envs, self._on_turn]  # [N]
        of_env = np.repeat(self._envs, len(self.agents))  # [N * A]
        return {"env_id": self._envs, "players.env_id": of_env, "players.action": actions.ravel()}

    def _read(self, observations: Any, info: dict[str, Any]) -> tuple[Tree, Bools]:
        """Observations [N, A, ...], and who is on turn [N, A]."""
        seen = self._by_agent(observations, info)  # [N, A, ...]
        self._in_turns = "current_player" in info
        acting = np.full(self._shape, not self._in_turns)
        if self._in_turns:
            env = info["env_id"]  # [N]
            self._on_turn = np.empty(self.num_envs, np.intp)
            self._on_turn[env] = info["current_player"]
            acting[self._envs, self._on_turn] = True
        if not self._masked:
            return seen, acting
        legal = info["legal_action_mask"]  # [N, n] of who is on turn
        masks = np.zeros((*self._shape, legal.shape[1]), np.int8)  # [N, A, n]
        masks[info["env_id"], info["current_player"]] = legal
        return {"observation": seen, "action_mask": masks}, acting

    def _numbers(self, info: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """The numbers [N, A] of an info: each player's own, and those of its game."""
        games, agents = self._shape
        of_games = given_numbers(info, games)
        of_players = given_numbers(info["players"], games * agents)
        rows = {name: np.repeat(given, agents) for name, given in of_games.items()} | of_players
        return {name: self._by_agent(given, info) for name, given in rows.items()}

    def _by_agent(self, rows: NDArray[Any], info: dict[str, Any]) -> NDArray[Any]:
        """Rows [N * A, ...] of the games in the order in which they were ready: [N, A, ...]."""
        ready = rows.reshape(*self._shape, *rows.shape[1:])
        in_order = np.empty_like(ready)
        in_order[info["env_id"]] = ready
        return in_order
