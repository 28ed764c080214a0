"""EnvPool's environments, which C++ threads step together. No torch here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.environments.simulator_extras import check_extra
from juggler.envrunner.failures import failures_of
from juggler.envrunner.multi_agent.slot_books import overdue_message
from juggler.envrunner.multi_agent.turns import AgentGroup, GroupTurn, Turn
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv, VectorStep
from juggler.runtime.near_matches import closest
from juggler.runtime.wire.structures import from_tree, take, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Tree

#: The prefix of their names in `env`.
SCHEME: Final = "envpool:"
#: EnvPool's option that lets environments run at their own pace.
AT_OWN_PACE: Final = "batch_size"
#: The only agent of each environment at its own pace.
_AGENT: Final = "agent"
#: Keys that EnvPool itself adds to infos.
_OF_ENVPOOL: Final = frozenset({"env_id", "id", "elapsed_step", "current_player"})

Bools = NDArray[np.bool_]


class _Pool:
    """N environments of EnvPool, which takes seeds only when making them.

    Raises:
        ValueError: EnvPool has no such environment, or an option is one that Juggler sets.
        EnvironmentFailed: it cannot make them.
    """

    def __init__(self, name: str, count: int, options: Mapping[str, Any]) -> None:
        self._name, self._options = name, {**options, "num_envs": count}
        self.made = self._make()

    def _make(self, **seed: int) -> Any:
        envpool = _envpool_with(self._name)
        with failures_of(SCHEME + self._name, "constructor"):
            return envpool.make_gymnasium(self._name, **self._options, **seed)

    def seed(self, seed: int) -> Any:
        """Recreate the environments with a seed."""
        self.made.close()
        self.made = self._make(seed=seed % 2**31)
        return self.made


class EnvPoolVector(VectorWrapper):
    """N environments of EnvPool, with NEXT_STEP autoreset."""

    def __init__(self, name: str, count: int, options: dict[str, Any]) -> None:
        self._pool, self._count = _Pool(name, count, options), count
        super().__init__(self._pool.made)
        # EnvPool only has the spaces of one environment.
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env = self._pool.seed(seed)
        observations, _ = self.env.reset()  # [N, ...]
        return observations, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *stepped, info = self.env.step(actions)
        # EnvPool's infos do not follow Gymnasium's conventions.
        return *stepped, _given_numbers(info, self._count)

    def close(self, **_: Any) -> None:
        self._pool.made.close()  # without Gymnasium's options


def make_envpool_vector(config: EnvRunnerConfig) -> EnvPoolVector:
    """Make the environments of a configuration whose `env` is envpool:…

    Raises:
        EnvironmentFailed: EnvPool cannot make them.
        ValueError: EnvPool is not installed or has no such environment, or an option is invalid.
    """
    check_extra(config.env)
    if config.vectorize not in ("auto", "native"):
        raise ValueError(
            f"vectorize = {config.vectorize!r}: EnvPool steps its environments itself; use auto or "
            "native"
        )
    if AT_OWN_PACE in config.env_kwargs:
        raise ValueError(
            f"env_kwargs.{AT_OWN_PACE}: the driver has not made {config.env}, so it has to be told "
            'of its agent: agents = {agent = "default"}'
        )
    _check_options(config.env_kwargs)
    return EnvPoolVector(config.env.removeprefix(SCHEME), config.envs_per_runner, config.env_kwargs)


def find_game(name: str) -> Callable[..., EnvPoolGame]:
    """Return a function that makes a game of EnvPool.

    Args:
        name: "envpool:GAME-vN", such as "envpool:ConnectFour-v1".

    Raises:
        ValueError: EnvPool is not installed.
    """
    check_extra(name)
    return functools.partial(EnvPoolGame, name.removeprefix(SCHEME))


class EnvPoolGame(MultiAgentVectorEnv):
    """N games of EnvPool with the agents "player_0", "player_1", and so on.

    In a game of turns, the player on turn observes {"observation": ..., "action_mask": int8 [n]},
    or only the observation if the game has no mask. In other games, all players act in every step.
    The step after the end of a game begins the next one, as in EnvPool.

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
        _check_options(options)
        self.num_envs = num_envs
        self.agents = tuple(f"player_{i}" for i in range(number_of_agents(name)))
        self._pool = _Pool(name, num_envs, options)
        self.action_space = self._pool.made.action_space
        observed = self._pool.made.observation_space
        _, info = self._pool.made.reset()
        self._masked = "legal_action_mask" in info
        if self._masked:
            size = info["legal_action_mask"].shape[1]
            mask = spaces.Box(0, 1, (size,), np.int8)
            observed = spaces.Dict(observation=observed, action_mask=mask)
        self.observation_space = observed
        self._envs = np.arange(num_envs, dtype=np.int32)
        self._shape = (num_envs, len(self.agents))  # [N, A]

    def reset(self, seed: int | None, which: Bools) -> tuple[Tree, Bools]:
        pool = self._pool.made if seed is None else self._pool.seed(seed)
        return self._read(*pool.reset())

    def step(self, actions: Any) -> VectorStep:
        sent = self._sent(actions)
        observations, rewards, terminated, truncated, info = self._pool.made.step(sent)
        seen, acting = self._read(observations, info)
        env = info["env_id"]  # [N]
        by_itself, cut = np.zeros((2, *self._shape), np.bool_)  # [N, A] each
        by_itself[env], cut[env] = terminated[:, None], truncated[:, None]
        acting &= ~(by_itself | cut)
        infos = self._numbers(info)
        return VectorStep(seen, self._by_agent(rewards, info), by_itself, cut, acting, infos)

    def close(self) -> None:
        self._pool.made.close()

    def _sent(self, actions: NDArray[Any]) -> Any:
        """Convert the actions [N, A] of all players for EnvPool."""
        actions = actions.astype(np.int32)
        if self._in_turns:
            return actions[self._envs, self._on_turn]  # [N]
        of_env = np.repeat(self._envs, len(self.agents))  # [N * A]
        return {"env_id": self._envs, "players.env_id": of_env, "players.action": actions.ravel()}

    def _read(self, observations: Any, info: dict[str, Any]) -> tuple[Tree, Bools]:
        """Return observations [N, A, ...], and the agents on turn [N, A]."""
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
        legal = info["legal_action_mask"]  # [N, n] of the player on turn
        masks = np.zeros((*self._shape, legal.shape[1]), np.int8)  # [N, A, n]
        masks[info["env_id"], info["current_player"]] = legal
        return {"observation": seen, "action_mask": masks}, acting

    def _numbers(self, info: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the numbers [N, A] in an info, of players and games."""
        games, agents = self._shape
        of_games = _given_numbers(info, games)
        of_players = _given_numbers(info["players"], games * agents)
        rows = {name: np.repeat(given, agents) for name, given in of_games.items()} | of_players
        return {name: self._by_agent(given, info) for name, given in rows.items()}

    def _by_agent(self, rows: NDArray[Any], info: dict[str, Any]) -> NDArray[Any]:
        """Order rows [N * A, ...] by game: [N, A, ...]."""
        ready = rows.reshape(*self._shape, *rows.shape[1:])
        in_order = np.empty_like(ready)
        in_order[info["env_id"]] = ready
        return in_order


def make_envpool_rows(
    config: EnvRunnerConfig, num_envs: int, critics_see: Collection[str]
) -> EnvPoolRows:
    """Make the environments of a configuration whose `env_kwargs` have EnvPool's batch_size.

    Raises:
        ValueError: an option is one that Juggler sets, or does not suit.
        EnvironmentFailed: EnvPool cannot make them.
    """
    check_extra(config.env)
    name, options = config.env.removeprefix(SCHEME), dict(config.env_kwargs)
    ready = options.pop(AT_OWN_PACE)
    _check_options(options)
    if type(ready) is not int or not 0 < ready < config.envs_per_runner:
        raise ValueError(
            f"env_kwargs.{AT_OWN_PACE} = {ready!r}: with this option, EnvPool hands over that many "
            f"environments as soon as they are ready; give an integer from 1 to below "
            f"envs_per_runner = {config.envs_per_runner}, or leave it out"
        )
    # Rows at their own pace have one agent each.
    if number_of_agents(name) > 1:
        raise ValueError(
            f"env_kwargs.{AT_OWN_PACE}: the players of {name} act together; leave it out"
        )
    if critics_see:
        raise ValueError(
            f"critic_sees = {sorted(critics_see)[0]!r}: the environment has one agent, whose value "
            "function sees its observation; leave it out"
        )
    return EnvPoolRows(name, num_envs, min(ready, num_envs), options)


class EnvPoolRows:
    """N environments of EnvPool; each step serves the first M ready ones.

    They are `MultiAgentEnvs` with one agent each, whose rows fill at their own pace: a slow
    environment does not delay the others.

    Args:
        num_envs: N.
        ready: M.

    Raises:
        ValueError: EnvPool has no such environment.
        EnvironmentFailed: it cannot make them.
    """

    agents: tuple[str, ...] = (_AGENT,)
    critic_spaces: Mapping[str, Space[Any]]

    def __init__(self, name: str, num_envs: int, ready: int, options: dict[str, Any]) -> None:
        self._name, self.num_envs = SCHEME + name, num_envs
        self._where = f"one of {num_envs} environments ({self._name})"
        self._pool = _Pool(name, num_envs, {**options, AT_OWN_PACE: ready})
        self._space: Space[Any] = self._pool.made.observation_space
        self._actions: Space[Any] = self._pool.made.action_space
        self.groups: tuple[AgentGroup, ...] = (AgentGroup(self.agents, self._space, self._actions),)
        self.critic_spaces = {}
        self._longest = 0  # steps of the longest ended episode
        self._begin()

    def _begin(self) -> None:
        self._acting = np.zeros(0, np.intp)  # [B] environments
        self._over = np.zeros(0, np.intp)  # [E] environments whose next step begins an episode
        self._begins = np.ones(self.num_envs, np.bool_)  # [N] the same, as flags
        self._returns = np.zeros(self.num_envs)  # [N] of the running episodes
        self._lengths = np.zeros(self.num_envs, np.intp)  # [N]

    def reset(self, seed: int) -> Turn:
        pool = self._pool.seed(environment_seeds(seed, 1)[0])
        self._begin()
        with failures_of(self._where, "reset"):
            pool.async_reset()
            return self._turn(*pool.recv())

    def step(self, actions: Sequence[Any]) -> Turn:
        (batch,) = actions
        envs = np.concatenate((self._acting, self._over)).astype(np.int32)  # [M]
        chosen = to_tree(self._actions, batch)  # [B, ...]
        if len(self._over):  # with any actions
            any_actions = zeros(self._actions, (len(self._over),))  # [E, ...]
            chosen = tree_map(lambda *each: np.concatenate(each), chosen, any_actions)
        with failures_of(self._where, "step"):
            self._pool.made.send(from_tree(self._actions, chosen), envs)
            return self._turn(*self._pool.made.recv())

    def _turn(
        self,
        observations: Any,
        rewards: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        info: dict[str, Any],
    ) -> Turn:
        """Assemble the turn of M environments, from their results in any order."""
        order = info["env_id"].argsort()  # [M]
        envs = info["env_id"][order].astype(np.intp)  # [M]
        seen: Tree = take(to_tree(self._space, observations), order)  # [M, ...]
        rewards, terminated = rewards[order].astype(np.float64), terminated[order]  # [M] both
        first = self._begins[envs]  # [M]
        rewards[first] = 0
        done = (terminated | truncated[order]) & ~first  # [M]
        # A step that begins an episode counts for none.
        self._returns[envs] = np.where(first, 0, self._returns[envs] + rewards)
        self._lengths[envs] = np.where(first, 0, self._lengths[envs] + 1)
        self._begins[envs] = done
        acts = ~done  # [M]
        self._acting, self._over = envs[acts], envs[done]
        returns, lengths = self._returns[self._over], self._lengths[self._over]  # [E] both
        if len(lengths):
            self._longest = max(self._longest, int(lengths.max()))
        # Environments that are over act once more, with any action: see `step`.
        group = GroupTurn(
            acting=self._acting,
            observations=take(seen, acts),
            first=first[acts],
            rewards=rewards[acts],
            ended=self._over,
            last_observations=take(seen, done),
            last_rewards=rewards[done],
            terminated=terminated[done],
        )
        # One agent: its returns are the environment's.
        ended_with = returns, lengths, returns[:, None]
        infos = {}
        for number, given in _given_numbers(info, len(envs)).items():
            infos[number] = np.zeros(self.num_envs, given.dtype)  # [N]
            infos[number][envs] = given[order]
        return Turn((group,), envs[first], self._over, *ended_with, stepped=envs, infos=infos)

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._returns.copy(), self._returns[:, None].copy()

    def overdue(self, steps: int) -> str:
        steps = max(steps, 2 * self._longest)
        env = int(self._lengths.argmax())
        if self._lengths[env] < steps:
            return ""
        remedy = "it has to truncate its episodes, perhaps with max_episode_steps in env_kwargs"
        return overdue_message(_AGENT, env, self._name, steps, remedy, idle=False)

    def close(self) -> None:
        self._pool.made.close()


def number_of_agents(name: str) -> int:
    """Return how many agents an environment of EnvPool has.

    Raises:
        ValueError: EnvPool has no such environment.
        EnvironmentFailed: it cannot load it.
    """
    envpool = _envpool_with(name)
    with failures_of(SCHEME + name, "constructor"):
        return int(envpool.make_spec(name).config.max_num_players)


def _envpool_with(name: str) -> Any:
    """Return the package, if it has an environment of this name."""
    envpool = importlib.import_module("envpool")
    if name not in (known := envpool.list_all_envs()):
        near = closest(name, known)
        hint = (
            f"did you mean {SCHEME + near!r}?" if near else "envpool.list_all_envs() has them all"
        )
        raise ValueError(f"env {SCHEME + name!r}: EnvPool has no such environment: {hint}")
    return envpool


def _given_numbers(info: Mapping[str, Any], rows: int) -> dict[str, NDArray[Any]]:
    """Return the numbers [rows] in the environments' info, by name."""
    return {
        name: given
        for name, given in info.items()
        if name not in _OF_ENVPOOL and isinstance(given, np.ndarray) and given.shape == (rows,)
    }


def _check_options(options: Collection[str]) -> None:
    """Raise ValueError for an EnvPool argument that Juggler sets."""
    if reserved := {"num_envs", "seed", "batch_size"}.intersection(options):
        raise ValueError(
            f"env_kwargs of an envpool: environment cannot have {', '.join(sorted(reserved))}: "
            "set envs_per_runner and seed instead"
        )
