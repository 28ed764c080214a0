"""Where no episode ends for long: how old the mean return is, and the hint at a limit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.worker_events_world import ROWS, WorkersWorld

from juggler.driver.record.metrics import Metrics
from juggler.driver.record.progress import PlainProgress
from juggler.driver.record.wording import age, conclude
from juggler.driver.workers.standstill import EndlessEpisodes
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env


def test_the_age_of_the_mean_return_is_the_time_since_an_episode_ended() -> None:
    metrics = Metrics()
    assert metrics.line(3.0, 100)["episode_return_age"] is None, "there is no mean yet"
    metrics.episodes_ended([-6578.0], [3000])
    assert metrics.line(5.0, 200)["episode_return_age"] == 0.0
    assert metrics.line(65.0, 5200)["episode_return_age"] == 60.0
    assert metrics.steps_without_an_end == 5000
    metrics.episodes_ended([-6578.0], [3000])
    assert metrics.line(70.0, 5300)["episode_return_age"] == 0.0, "the same return, but of now"
    assert metrics.steps_without_an_end == 0


def test_a_run_that_is_resumed_counts_from_there(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.episodes_ended([1.0], [10])
    metrics.goes_on(600.0, 10_000)
    assert metrics.line(602.0, 10_500)["episode_return_age"] == 2.0
    assert metrics.steps_without_an_end == 500


@pytest.mark.parametrize(
    ("seconds", "said"), [(None, ""), (9.9, ""), (10.0, "10.0 s"), (83, "1:23")]
)
def test_an_old_mean_is_shown_with_its_age(seconds: float | None, said: str) -> None:
    line: dict[str, Any] = {
        "wall_time": 700.0,
        "episode_return_mean": -6578.0,
        "episode_return_age": seconds,
        "env_steps_trained": 778_000,
        "steps_per_second": 1000.0,
        "staleness_mean": 1.0,
        "updates": 5,
        "num_env_runners": 2,
    }
    assert age(line) == said
    stream = io.StringIO()
    PlainProgress(stream).update(line)
    old = f" ({said} old)" if said else ""
    assert f"return -6578.0{old}  steps  778k" in stream.getvalue()
    assert f"return -6578.0{old} after 778k steps" in conclude(line)


def _world(directory: Path, steps: int, lengths: list[int], **keys: Any) -> WorkersWorld:
    """Whose environments have made so many steps each since the last of these episodes ended."""
    world = WorkersWorld(directory, **keys)
    metrics = world.parts.metrics
    metrics.episodes_ended([-1.0] * len(lengths), lengths)
    metrics.line(1.0, 1000)
    metrics.line(2.0, (1000 if lengths else 0) + steps * ROWS)
    return world


@pytest.mark.parametrize(
    ("steps", "lengths", "told"),
    [
        (4999, [], False),
        (5000, [], True),
        (5000, [10, 20], True),
        (5000, [10, 2501], False),
        (5002, [10, 2501], True),
    ],
)
def test_a_hint_comes_once_where_no_episode_has_ended_for_long(
    tmp_path: Path, steps: int, lengths: list[int], told: bool
) -> None:
    world = _world(tmp_path, steps, lengths)
    endless = EndlessEpisodes(EnvRunnerConfig(env="CliffWalking-v1", envs_per_runner=ROWS))
    texts = endless.look(world.parts)
    assert len(texts) == told
    if told:
        assert f"no episode has ended in the last {steps:,} steps of each environment" in texts[0]
        assert ("the return is that of earlier ones" in texts[0]) == bool(lengths)
        assert texts[0].endswith("set a limit: max_episode_steps = 1000")
    assert endless.look(world.parts) == []


@pytest.mark.parametrize("left", [0, 1])
def test_steps_of_envrunners_that_are_gone_are_not_taken_for_those_of_one_environment(
    tmp_path: Path, left: int
) -> None:
    world = _world(tmp_path, 0, [10], num_env_runners=4)
    runners = [world.runner, *(world.join("envrunner", index) for index in (1, 2, 3))]
    for runner in runners[1:]:
        world.get_ready(runner)
    endless = EndlessEpisodes(EnvRunnerConfig(env="CliffWalking-v1", envs_per_runner=ROWS))
    assert endless.look(world.parts) == []
    world.parts.metrics.line(3.0, 1000 + 4 * 4999 * ROWS)
    for runner in runners[left:]:
        world.leave(runner)
    assert endless.look(world.parts) == []
    world.parts.metrics.line(4.0, 1000 + 4 * 5000 * ROWS)
    (text,) = endless.look(world.parts)
    assert "in the last 5,000 steps of each environment" in text


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        ({"env": "mine:Env"}, "set a limit: max_episode_steps = 1000"),
        ({"env": "dm_env_rpc://host:1"}, "have the simulator truncate them"),
        ({"gateway": "127.0.0.1:0"}, "have the simulator truncate them"),
    ],
)
def test_the_hint_is_what_the_environment_can_do(
    tmp_path: Path, keys: dict[str, Any], remedy: str
) -> None:
    world = _world(tmp_path, 5000, [])
    (text,) = EndlessEpisodes(EnvRunnerConfig(envs_per_runner=ROWS, **keys)).look(world.parts)
    assert text.endswith(remedy)


def cliff() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CliffWalking-v1", max_episode_steps=None)


@pytest.mark.parametrize(
    "keys",
    [
        {"max_episode_steps": 7},
        {"env_kwargs": {"max_episode_steps": 7}},
        {"env_wrappers": [{"use": "TimeLimit", "max_episode_steps": 7}]},
    ],
)
@pytest.mark.parametrize("env", ["CliffWalking-v1", "CartPole-v1", f"{__name__}:cliff"])
def test_what_the_hint_says_ends_episodes(env: str, keys: dict[str, Any]) -> None:
    if ":" in env and "max_episode_steps" in keys.get("env_kwargs", {}):
        pytest.skip("what is called with env_kwargs may know no such limit")
    made = make_vector_env(EnvRunnerConfig(env=env, envs_per_runner=2, **keys))
    made.reset(seed=1)
    ended = []
    for _ in range(7):
        _, _, terminated, truncated, _ = made.step(np.zeros(2, np.int64))
        ended.append(bool((terminated | truncated).all()))
    made.close()
    assert ended == [False] * 6 + [True]
