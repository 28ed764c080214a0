"""One run's policy records demonstrations, and another run learns from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.place import Place, assert_books_balance, eventually, metrics, seeds, summary
from support.random_episodes import write

import juggler
from juggler.envrunner.environments.vector import make_vector_env
from juggler.runtime.datasets.dataset import Dataset, RecordedEpisode

#: Observation and the random numbers of an episode -> an action.
Rule = Callable[[np.ndarray, np.random.Generator], Any]


def balanced(observation: np.ndarray, generator: np.random.Generator) -> int:
    """Holds CartPole's pole for as long as episodes last."""
    x, speed, angle, turning = observation.tolist()
    return int(0.1 * x + 0.3 * speed + 3 * angle + turning > 0)


def swung_up(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Swings Pendulum up and holds it: -135 on average."""
    cosine, sine, turning = observation.tolist()
    if cosine > 0.85 and abs(turning) < 4:
        torque = -10 * np.arctan2(sine, cosine) - 3 * turning
    else:
        energy = turning**2 / 2 + 15 * cosine  # 15 when it stands upright and still
        torque = 2 * np.sign(turning or 1.0) * (1 if energy < 15.5 else -1)
    return np.clip(np.array([torque], np.float32), -2, 2)


def played(env_id: str, rules: Sequence[Rule]) -> list[RecordedEpisode]:
    """An episode by each of these rules, with seeds from 0 on."""
    env, generator, episodes = gymnasium.make(env_id), np.random.default_rng(0), []
    for seed, rule in enumerate(rules):
        observation, _ = env.reset(seed=seed)
        seen, actions, rewards = [observation], [], []
        terminated = truncated = False
        while not (terminated or truncated):
            actions.append(rule(observation, generator))
            observation, reward, terminated, truncated, _ = env.step(actions[-1])
            seen.append(observation)
            rewards.append(reward)
        columns = np.stack(seen), np.array(actions), np.array(rewards, np.float32)
        episodes.append(RecordedEpisode(*columns, terminated))
    env.close()
    return episodes


pytest.importorskip("minari", reason="needs juggler[datasets]")
pytestmark = [pytest.mark.slow]

CARTPOLE = juggler.RunConfig.from_flat({"env": "CartPole-v1"}).env_runner


def recorded(place: Path, env_id: str, rules: Sequence[Rule]) -> float:
    """A data set of an episode by each rule; the mean return."""
    episodes, env = played(env_id, rules), gymnasium.make(env_id)
    write(place, episodes, env.observation_space, env.action_space, env=env_id)
    env.close()
    return float(np.mean([episode.rewards.sum() for episode in episodes]))


def mostly_wrong(observation: np.ndarray, generator: np.random.Generator) -> int:
    """CartPole's rule, with 55 of 100 actions wrong."""
    right = balanced(observation, generator)
    return 1 - right if generator.random() < 0.55 else right


def at_random(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Any action of Pendulum."""
    return generator.uniform(-2, 2, 1).astype(np.float32)


@seeds
@pytest.mark.long
def test_ten_episodes_of_cartpole_teach_to_hold_poles(place: Place, seed: int) -> None:
    assert recorded(place.path / "shown", "CartPole-v1", [balanced] * 10) == 500
    options = ("--algorithm", "bc", "--dataset", "shown", "--seed", seed, "--stop-steps", 150_000)
    run = place.run("train", *options, "--run-dir", "run")
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    assert summary(place.path / "run")["reason_for_stop"] == "stop_steps"
    place.assert_nothing_is_left()
    played = juggler.evaluate(place.path / "run", episodes=50, seed=1000)
    assert played.mean >= 475, (played.returns, metrics(place.path / "run")[-1])


@pytest.mark.long
@seeds
def test_ten_episodes_of_cartpole_are_imitated_in_place_of_rewards(place: Place, seed: int) -> None:
    recorded(place.path / "shown", "CartPole-v1", [balanced] * 10)
    table = json.dumps({"demonstrations": "shown", "limit": 1.0})
    options = ("--algorithm", "ppo", "--synchronous", "--seed", seed, "--imitation", table)
    stops = ("--stop-return", 475, "--stop-steps", 1_000_000)
    run = place.run("train", "cartpole", *options, *stops, "--run-dir", "run")
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    assert summary(place.path / "run")["solved"], run.output
    told = summary(place.path / "run")["modules"]["default"]
    assert abs(told["imitation_reward"]) < 1, "hardly to be told from the demonstrations"
    assert str(place.path / "shown") in (place.path / "run" / "config.toml").read_text()
    place.assert_nothing_is_left()


TRIED = {
    # 55 of 100 actions of CartPole are wrong; a clone balances for less long than what it clones.
    "CartPole-v1": (
        [mostly_wrong] * 200,
        60_000,
        ("--reward-scale", 0.1, "--advantage-weight", 10, "--expectile", 0.8),
    ),
    # 20 episodes of a rule beside 80 of random actions.
    "Pendulum-v1": (
        [*[swung_up] * 20, *[at_random] * 80],
        200_000,
        ("--reward-scale", 0.1, "--expectile", 0.8),
    ),
}


@pytest.mark.long
@seeds
@pytest.mark.parametrize("env_id", TRIED)
def test_iql_finds_the_better_actions_of_a_data_set_and_bc_the_usual_ones(
    place: Place, env_id: str, seed: int
) -> None:
    rules, steps, by_rewards = TRIED[env_id]
    mean = recorded(place.path / "tried", env_id, rules)
    options = ("--dataset", "tried", "--seed", seed, "--stop-steps", steps)
    small = ("--lr", 0.001, "--model", '{"hidden_sizes": [64, 64], "activation": "relu"}')
    returns = {}
    for name, own in (("bc", ()), ("iql", by_rewards)):
        run = place.run("train", "--algorithm", name, *options, *small, *own, "--run-dir", name)
        assert run.status == 0, run.output
        assert_books_balance(place.path / name)
        returns[name] = juggler.evaluate(place.path / name, episodes=50, seed=1000).mean
    if env_id == "CartPole-v1":
        assert returns["bc"] < mean < 2 * mean < returns["iql"], (returns, mean)
    else:
        assert returns["bc"] < -800 < -400 < returns["iql"], returns
    place.assert_nothing_is_left()


def test_what_a_policy_does_is_recorded_as_it_is_evaluated(place: Place) -> None:
    first = place.run("train", "cartpole", "--stop-steps", 20_000, "--run-dir", "first")
    assert first.status == 0, first.output
    made = place.run("record", "first", "--episodes", 7)
    assert made.status == 0, made.output
    evaluated = juggler.evaluate(place.path / "first", episodes=7)
    dataset = Dataset(str(place.path / "first" / "demonstrations"))
    episodes = [dataset.episode(index) for index in range(len(dataset))]
    assert sorted(map(len, episodes)) == sorted(evaluated.lengths)
    envs = make_vector_env(CARTPOLE, just_one=True)
    dataset.must_have_the_spaces_of("CartPole-v1", envs)
    envs.close()
    policy = juggler.load_policy(place.path / "first")
    for episode in episodes:
        np.testing.assert_array_equal(policy.act(episode.observations[:-1])[0], episode.actions)
    again = place.run("record", "first", "--episodes", 7)
    assert again.status == 1, again.output
    assert "first/demonstrations is there already" in again.output
    place.assert_nothing_is_left()


def test_a_run_with_a_data_set_is_evaluated_and_resumed(place: Place) -> None:
    recorded(place.path / "shown", "CartPole-v1", [balanced] * 2)
    evaluations = ("--evaluation-seconds", 0.5, "--evaluation-episodes", 2)
    options = ("--algorithm", "bc", "--dataset", "shown", "--run-dir", "run")
    run = place.start("train", *options, *evaluations)
    best = place.path / "run" / "best"
    eventually(lambda: list(best.glob("*/evaluation.json")), 200, lambda: run.output)
    run.interrupt()
    assert run.wait(60) == 130, run.output
    assert_books_balance(place.path / "run")
    lines = metrics(place.path / "run")
    assert all(line["episode_return_mean"] is None for line in lines)
    config = (place.path / "run" / "config.toml").read_text()
    assert f'dataset = "{place.path.resolve()}/shown"' in config
    before = summary(place.path / "run")["env_steps_trained"]
    resumed = place.run("train", "--resume", "run", "--stop-steps", before + 1000)
    assert resumed.status == 0, resumed.output
    assert summary(place.path / "run")["env_steps_trained"] >= before + 1000
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()
