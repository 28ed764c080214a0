"""EnvPool's environments at their own pace, with a stand-in; and with EnvPool, where installed."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paced_sampling import Halves, sampler_of
from support.pools import Pools

import juggler
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.making import has_several_agents, make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.multi_agent.whole_episodes import play_whole_episodes
from juggler.envrunner.rounds import Recorded
from juggler.runtime.episodes.version import Version

INSTALLED = importlib.util.find_spec("envpool") is not None


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    made = Pools()
    monkeypatch.setitem(sys.modules, "envpool", made)
    return made


def made(name: str = "Walks-v1", num_envs: int = 6, ready: Any = 2, **keys: Any) -> MultiAgentEnvs:
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
    envs = made()
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
    assert turns[0] < 0.7 * min(turns[env] for env in range(1, 6)), "who is slow holds nobody up"
    envs.close()
    assert all(pool.closed for pool in pools.made)


def test_rows_hold_whole_walks_and_every_step_once(pools: Pools) -> None:
    envs = made()
    sampler = sampler_of(envs, {"agent": "default"}, steps=4, module=Halves)
    seen: dict[int, list[int]] = {env: [] for env in range(6)}
    ended: list[int] = []
    for _ in range(150):
        played = sampler.sample(["default"], {"default": Version(1, 1)})
        ended += played.env_lengths
        result = played.modules["default"]
        assert isinstance(result, Recorded)
        if result.batch is None:
            continue
        batch: Any = result.batch
        for row in range(batch.rows):
            of_row, env = batch.observations[row], int(batch.observations[row, 0, 0])
            assert (of_row[:, 0] == env).all()
            assert batch.live[row].all()
            np.testing.assert_allclose(batch.rewards[row], batch.actions[row] + 0.1, rtol=1e-6)
            done = batch.terminated[row] | batch.truncated[row]
            assert done.tolist() == (of_row[:, 1] == length_of(env) - 1).tolist()
            assert batch.truncated[row].any() == (bool(env % 2) and done.any())
            seen[env] += of_row[:, 1].astype(int).tolist()
    for env, steps in seen.items():
        assert steps == [k % length_of(env) for k in range(len(steps))], "none is missing"
    assert len(seen[1]) > 1.3 * len(seen[0]) > 20, "who is slow fills fewer rows"
    assert {*ended} == {3, 4, 5}


def test_evaluations_count_the_steps_of_each_environment(pools: Pools) -> None:
    envs = made()
    modules = list(sampler_of(envs, {"agent": "default"}, 4, module=Halves)._modules.values())
    _, lengths, _ = play_whole_episodes(envs, modules, 12, seed=0)
    assert lengths == [3, 3, 4, 4, 5, 5] * 2
    _, lengths, _ = play_whole_episodes(envs, modules, 12, seed=0, most_steps=3)
    assert lengths == [3, 3, 3, 1, 3, 2] * 2


def test_environments_follow_from_the_seed(pools: Pools) -> None:
    envs, again = made(), made()
    assert envs.reset(3).groups[0].acting.tolist() == again.reset(3).groups[0].acting.tolist()
    assert pools.made[-1].seed == pools.made[-2].seed != 0
    assert len({tuple(envs.reset(seed).groups[0].acting.tolist()) for seed in range(9)}) > 1


def test_a_walk_without_an_end_is_told(pools: Pools) -> None:
    envs = made()
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
        ({"env_kwargs": {"seed": 3}}, "cannot have seed"),
        ({"name": "Stones-v1"}, "the players of Stones-v1 act together"),
        ({"vectorize": "async"}, "use auto or native"),
        ({"autoreset": "disabled"}, "leave it out"),
    ],
)
def test_what_does_not_suit_is_told(pools: Pools, keys: Any, words: str) -> None:
    with pytest.raises((ValueError, EnvironmentFailed), match=words):
        made(**keys)


def test_only_environments_with_the_option_go_at_their_own_pace(pools: Pools) -> None:
    assert has_several_agents(EnvRunnerConfig(env="envpool:Walks-v1", env_kwargs={"batch_size": 2}))
    assert not has_several_agents(EnvRunnerConfig(env="envpool:Walks-v1"))


def test_where_nobody_named_the_agent_it_is_said(pools: Pools) -> None:
    config = EnvRunnerConfig(env="envpool:Walks-v1", env_kwargs={"batch_size": 2})
    with pytest.raises(ValueError, match=r'agents = \{agent = "default"\}'):
        make_vector_env(config)


@pytest.mark.skipif(not INSTALLED, reason="needs juggler[envpool]")
def test_cartpoles_of_envpool_go_at_their_own_pace() -> None:
    envs = made("CartPole-v1", num_envs=8, ready=3)
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


@pytest.mark.long
@pytest.mark.skipif(not INSTALLED, reason="needs juggler[envpool]")
def test_a_run_learns_from_them(tmp_path: Path) -> None:
    result = juggler.train(
        "cartpole",
        env="envpool:CartPole-v1",
        env_kwargs={"batch_size": 24},
        envs_per_runner=64,
        stop_return=150.0,
        confirm=False,
        stop_seconds=120.0,
        run_dir=str(tmp_path / "run"),
        progress="off",
    )
    assert result.summary["solved"]
