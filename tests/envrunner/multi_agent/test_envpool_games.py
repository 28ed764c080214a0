"""EnvPool's games for several players, with a stand-in; and with EnvPool, where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
from support.paced_sampling import Halves, sampler_of
from support.pools import STONES, TOGETHER_STEPS, Pools

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.making import has_several_agents, make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.envrunner.multi_agent.whole_episodes import play_whole_episodes
from juggler.runtime.episodes.version import Version


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


def test_everybody_acts_in_a_game_that_has_no_turns(pools: Pools) -> None:
    envs = made("envpool:Together-v1", num_envs=2)
    turn = envs.reset(seed=1)
    assert turn.groups[0].acting.tolist() == [0, 1, 2, 3]
    for step in range(TOGETHER_STEPS):
        turn = envs.step([np.array([0, 1, 1, step])])
    (group,) = turn.groups
    assert len(group.acting) == 0
    assert not group.terminated.any(), "truncated"
    assert turn.agent_returns.tolist() == [[0, 3], [3, 3]]
    turn = envs.step([np.zeros(0, np.int64)])
    assert turn.began.tolist() == [0, 1]
    assert turn.groups[0].acting.tolist() == [0, 1, 2, 3]


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
    with pytest.raises(ValueError, match="no such environment: did you mean 'envpool:Stones-v1'"):
        has_several_agents(EnvRunnerConfig(env="envpool:Stone-v1"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"env_kwargs": {"num_envs": 3}}, "set envs_per_runner instead"),
        ({"env_kwargs": {"seed": 3}}, "cannot have seed: set envs_per_runner and seed instead"),
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


@pytest.mark.skipif(not importlib.util.find_spec("envpool"), reason="needs juggler[envpool]")
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
