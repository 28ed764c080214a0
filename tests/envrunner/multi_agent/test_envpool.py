"""EnvPool's environments and games: stand-ins, and the real ones if installed."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from support.scripted_agents import Halves, Scaled, sampler_of

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.evaluation import play_whole_episodes
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.info_numbers import InfoNumber, InfoNumbers
from juggler.envrunner.multi_agent.make_envs import has_several_agents, make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import tree_leaves

STONES = 5
TOGETHER_STEPS = 3


class Stones:
    """Take one or two stones in turn; the last one wins.

    Each sees how many stones there are; the first player is drawn."""

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
    """Both choose at once, see both choices, and are cut off."""

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
    """Walkers in N environments; `recv` returns the first M.

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


class Pools(ModuleType):
    """The module `envpool`, with what was made of it."""

    GAMES: ClassVar = {"Stones-v1": Stones, "Together-v1": Together}
    WALKS: ClassVar = {"Walks-v1": Walks}

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


needs_envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="needs juggler[envpool]"
)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    made = Pools()
    monkeypatch.setitem(sys.modules, "envpool", made)
    return made


def made(name: str, num_envs: int = 5, **keys: Any) -> MultiAgentEnvs:
    return make_multi_agent_envs(EnvRunnerConfig(env=name, envs_per_runner=num_envs, **keys))


def drawn(turn: Turn, random: np.random.Generator) -> Any:
    """A legal move of each agent on turn."""
    (group,) = turn.groups
    masks = group.observations["action_mask"]
    return np.array([random.choice(np.flatnonzero(mask)) for mask in masks], np.int64)


def test_every_player_is_told_what_its_own_moves_led_to(pools: Pools) -> None:
    envs = made("envpool:Stones-v1")
    random = np.random.default_rng(0)
    turn = envs.reset(seed=7)
    left = np.full(5, STONES)
    moves, finished = np.zeros(5, int), 0
    running = np.ones(5, bool)
    for _ in range(200):
        (group,) = turn.groups
        env, player = np.divmod(group.acting, 2)
        assert env.tolist() == np.flatnonzero(running).tolist(), "one player of each running game"
        seen: Any = group.observations
        assert seen["observation"].argmax(1).tolist() == left[env].tolist()
        assert seen["action_mask"].sum(1).tolist() == np.minimum(left[env], 2).tolist()
        assert group.first.tolist() == [moves[e] < 2 for e in env]
        assert not group.rewards.any(), "only an end has rewards"
        actions = drawn(turn, random)
        left[env] -= actions + 1
        moves[env] += 1
        turn = envs.step([actions])
        over = env[left[env] == 0]
        assert turn.over.tolist() == over.tolist()
        assert turn.began.tolist() == np.flatnonzero(~running).tolist(), "a step after the end"
        assert turn.env_lengths.tolist() == moves[over].tolist()
        winner = dict(zip(env.tolist(), player.tolist(), strict=True))
        expected = [[1.0, -1.0] if winner[e] == 0 else [-1.0, 1.0] for e in over.tolist()]
        assert turn.agent_returns.tolist() == expected
        (group,) = turn.groups
        assert group.last_rewards.tolist() == [each for both in expected for each in both]
        assert group.terminated.all()
        assert len(group.ended) == 2 * len(over)
        running = left > 0
        left[turn.began], running[turn.began], moves[turn.began] = STONES, True, 0
        finished += len(over)
    assert finished > 100
    envs.close()
    assert all(pool.closed for pool in pools.made)


def test_the_step_that_begins_a_game_counts_in_no_episode(pools: Pools) -> None:
    envs = made("envpool:Together-v1", num_envs=2)
    played_by = dict.fromkeys(envs.agents, "both")
    sampler = sampler_of(envs, played_by, steps=2 * TOGETHER_STEPS + 2, module=Halves)
    played = sampler.sample(["both"], {"both": Version(1, 1)})
    assert played.env_lengths == [TOGETHER_STEPS] * 4
    modules = list(sampler._modules.values())
    _, lengths, _ = play_whole_episodes(envs, modules, 5, seed=0)
    assert lengths == [TOGETHER_STEPS] * 5
    _, lengths, _ = play_whole_episodes(envs, modules, 6, seed=0, most_steps=2)
    assert lengths == [2, 1, 2, 2, 1, 2], "two halves of each game"


def test_games_follow_from_the_seed(pools: Pools) -> None:
    envs, again = made("envpool:Stones-v1"), made("envpool:Stones-v1")
    assert envs.reset(3).groups[0].acting.tolist() == again.reset(3).groups[0].acting.tolist()
    assert pools.made[-1].seed == pools.made[-2].seed != 0
    begun = {tuple(envs.reset(seed).groups[0].acting.tolist()) for seed in range(5)}
    assert len(begun) > 1


def test_envpool_says_which_of_its_environments_have_several_agents(pools: Pools) -> None:
    assert has_several_agents(EnvRunnerConfig(env="envpool:Stones-v1"))
    assert not has_several_agents(EnvRunnerConfig(env="envpool:Pong-v5"))
    with pytest.raises(ValueError, match="no such environment: did you mean"):
        has_several_agents(EnvRunnerConfig(env="envpool:Stone-v1"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"env_kwargs": {"num_envs": 3}}, "set envs_per_runner instead"),
        ({"env_kwargs": {"seed": 3}}, "cannot have seed: set"),
        ({"vectorize": "async"}, "use auto or native"),
        ({"max_episode_steps": 9}, "have them truncate their episodes"),
    ],
)
def test_keys_that_it_does_not_have_are_told(pools: Pools, keys: Any, words: str) -> None:
    with pytest.raises((ValueError, EnvironmentFailed), match=words):
        made("envpool:Stones-v1", **keys)


def test_without_envpool_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ValueError, match="needs the package envpool"):
        has_several_agents(EnvRunnerConfig(env="envpool:KuhnPoker-v1"))


@needs_envpool
@pytest.mark.parametrize(
    ("name", "players", "lengths"),
    [("KuhnPoker-v1", 2, (2, 3)), ("ConnectFour-v1", 2, (7, 42)), ("TicTacToe-v1", 2, (5, 9))],
)
def test_a_game_of_envpool_plays_by_its_rules(
    name: str, players: int, lengths: tuple[int, int]
) -> None:
    envs = made(f"envpool:{name}", num_envs=8)
    assert len(envs.agents) == players
    random, turn, played = np.random.default_rng(0), envs.reset(seed=1), 0
    for _ in range(300):
        turn = envs.step([drawn(turn, random)])
        played += len(turn.over)
        assert not turn.env_returns.any(), "a zero-sum game"
        assert not np.isnan(turn.agent_returns).any()
        if len(turn.over):
            assert lengths[0] <= turn.env_lengths.min() <= turn.env_lengths.max() <= lengths[1]
    assert played > 30
    envs.close()


# -- at their own pace


def at_own_pace(
    name: str = "Walks-v1", num_envs: int = 6, ready: Any = 2, **keys: Any
) -> MultiAgentEnvs:
    kwargs = {"batch_size": ready, **keys.pop("env_kwargs", {})}
    config = EnvRunnerConfig(
        env=f"envpool:{name}", envs_per_runner=num_envs, env_kwargs=kwargs, **keys
    )
    return make_multi_agent_envs(config)


def length_of(env: int) -> int:
    return 3 + env % 3


def test_each_turn_has_those_that_were_ready_and_tells_each_what_its_action_led_to(
    pools: Pools,
) -> None:
    envs = at_own_pace()
    random, turn = np.random.default_rng(0), envs.reset(seed=4)
    steps = np.full(6, -1)  # of the running walk; -1: the next turn begins one
    chosen, returns, over, turns = np.zeros(6), np.zeros(6), Counter[int](), Counter[int]()
    for _ in range(600):
        (group,) = turn.groups
        present = np.concatenate((group.acting, group.ended))
        assert len({*present.tolist()}) == 2, "two are ready, each of them once"
        turns.update(present.tolist())
        for env, seen, first, reward in zip(
            group.acting.tolist(), group.observations, group.first, group.rewards, strict=True
        ):
            assert first == (steps[env] == -1)
            steps[env] += 1
            assert seen.tolist() == [env, steps[env]]
            assert reward == pytest.approx(0 if first else chosen[env] + 0.1)
            returns[env] = 0 if first else returns[env] + reward
        for k, env in enumerate(group.ended.tolist()):
            assert group.last_observations[k].tolist() == [env, length_of(env)]
            assert steps[env] == length_of(env) - 1
            assert group.terminated[k] == (env % 2 == 0)
            assert group.last_rewards[k] == pytest.approx(chosen[env] + 0.1)
            assert turn.env_returns[k] == pytest.approx(returns[env] + group.last_rewards[k])
            assert turn.env_lengths[k] == length_of(env)
            steps[env] = -1
            over[env] += 1
        assert turn.over.tolist() == group.ended.tolist() == sorted(group.ended.tolist())
        assert group.acting.tolist() == sorted(group.acting.tolist())
        assert turn.began.tolist() == group.acting[group.first].tolist()
        actions = random.integers(2, size=len(group.acting))
        chosen[group.acting] = actions
        turn = envs.step([actions])
    assert min(over[env] for env in range(6)) > 10
    assert turns[0] < 0.7 * min(turns[env] for env in range(1, 6)), "a slow one delays no other"
    envs.close()
    assert all(pool.closed for pool in pools.made)


def test_evaluations_count_the_steps_of_each_environment(pools: Pools) -> None:
    envs = at_own_pace()
    modules = list(sampler_of(envs, {"agent": "default"}, 4, module=Halves)._modules.values())
    _, lengths, _ = play_whole_episodes(envs, modules, 12, seed=0)
    assert lengths == [3, 3, 4, 4, 5, 5] * 2
    _, lengths, _ = play_whole_episodes(envs, modules, 12, seed=0, most_steps=3)
    assert lengths == [3, 3, 3, 1, 3, 2] * 2


def test_a_walk_without_an_end_is_told(pools: Pools) -> None:
    envs = at_own_pace()
    pool: Any = pools.made[-1]
    assert envs.overdue(100) == ""
    turn = envs.reset(seed=0)
    pool = pools.made[-1]
    for _ in range(200):
        pool.steps[:] = 0  # so that none of them ends
        turn = envs.step([np.zeros(len(turn.groups[0].acting), np.int64)])
    assert "which has not ended within 30 steps of one episode" in envs.overdue(30)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ready": 6}, "from 1 to below envs_per_runner = 6"),
        ({"ready": 0}, "env_kwargs.batch_size = 0"),
        ({"ready": "2"}, "env_kwargs.batch_size = '2'"),
        ({"name": "Stones-v1"}, "the players of Stones-v1 act together"),
    ],
)
def test_what_does_not_suit_is_told(pools: Pools, keys: Any, words: str) -> None:
    with pytest.raises((ValueError, EnvironmentFailed), match=words):
        at_own_pace(**keys)


def test_only_environments_with_the_option_go_at_their_own_pace(pools: Pools) -> None:
    assert has_several_agents(EnvRunnerConfig(env="envpool:Walks-v1", env_kwargs={"batch_size": 2}))
    assert not has_several_agents(EnvRunnerConfig(env="envpool:Walks-v1"))


def test_where_nobody_named_the_agent_it_is_said(pools: Pools) -> None:
    config = EnvRunnerConfig(env="envpool:Walks-v1", env_kwargs={"batch_size": 2})
    with pytest.raises(ValueError, match=r'agents = \{agent = "default"\}'):
        make_vector_env(config)


@needs_envpool
def test_cartpoles_of_envpool_go_at_their_own_pace() -> None:
    envs = at_own_pace("CartPole-v1", num_envs=8, ready=3)
    random, turn = np.random.default_rng(0), envs.reset(seed=1)
    lengths: list[int] = []
    for _ in range(1500):
        (group,) = turn.groups
        assert len(group.acting) + len(group.ended) == 3
        assert turn.env_returns.tolist() == turn.env_lengths.tolist(), "1 for each step"
        lengths += turn.env_lengths.tolist()
        turn = envs.step([random.integers(2, size=len(group.acting))])
    assert len(lengths) > 100
    assert 15 < np.mean(lengths) < 30, "as with random actions"
    envs.close()


# -- numbers in infos


class Alike(Scaled):
    """Gives all actions the same inputs."""

    def _forward(self, batch: Any) -> Any:
        _, seen = next(tree_leaves(batch["observations"]))
        return {
            "action_dist_inputs": torch.zeros(len(seen), self.action_distribution().inputs_size)
        }


def of_rounds(name: str, num_envs: int, steps: int, **kwargs: Any) -> tuple[InfoNumbers, list[int]]:
    """Numbers and lengths of the episodes of a round."""
    config = EnvRunnerConfig(env=f"envpool:{name}", envs_per_runner=num_envs, env_kwargs=kwargs)
    envs = make_multi_agent_envs(config)
    sampler = sampler_of(envs, dict.fromkeys(envs.agents, "m"), steps, module=Alike)
    played = sampler.sample(["m"], {"m": Version(1, 1)})
    envs.close()
    return played.infos, played.env_lengths


def test_numbers_of_players_and_of_their_games_are_told(pools: Pools) -> None:
    infos, lengths = of_rounds("Together-v1", 3, 2 * TOGETHER_STEPS + 1)
    assert lengths == [TOGETHER_STEPS] * 6
    numbers = ("stones", "place")
    assert infos.keys() == {f"player_{i}/{number}" for i in range(2) for number in numbers}
    last = float(STONES - TOGETHER_STEPS)
    for i in range(2):
        assert infos[f"player_{i}/stones"] == [InfoNumber(last + 1, last, last + 2)] * 6
        places = [float(10 * env + i) for env in range(3)] * 2
        assert infos[f"player_{i}/place"] == [InfoNumber(place, place, place) for place in places]
