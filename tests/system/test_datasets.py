"""Demonstrations are recorded with one run's policy, and another run learns from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from support.datasets import random_episodes, write
from support.place import Place, assert_books_balance, eventually, metrics, summary
from support.rules import Rule, balanced, played, swung_up
from support.seeds import seeds

import juggler
from juggler.envrunner.environments.vector import make_vector_env
from juggler.runtime.datasets.dataset import Dataset

pytest.importorskip("minari", reason="needs juggler[datasets]")
pytestmark = [pytest.mark.slow]

CARTPOLE = juggler.RunConfig.from_flat({"env": "CartPole-v1"}).env_runner


def recorded(place: Path, env_id: str, rules: Sequence[Rule]) -> float:
    """A data set of an episode by each of these rules -> the mean return."""
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


@pytest.mark.long
@seeds
def test_dqn_imitates_ten_episodes_of_cartpole_from_kept_steps(place: Place, seed: int) -> None:
    """In training, the mean of 100 episodes is 475 only some 50,000 steps later."""
    recorded(place.path / "shown", "CartPole-v1", [balanced] * 10)
    table = json.dumps({"demonstrations": "shown", "limit": 1.0})
    options = ("--n-step", 1, "--synchronous", "--seed", seed, "--imitation", table)
    run = place.run("train", "cartpole-dqn", *options, "--stop-steps", 30_000, "--run-dir", "run")
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    told = summary(place.path / "run")["modules"]["default"]
    assert told["discriminator_loss"] > 0.5, "it does not know demonstrations by heart"
    played = juggler.evaluate(place.path / "run", episodes=30, seed=1000)
    assert played.mean >= 475, (played.returns, told)
    place.assert_nothing_is_left()


@pytest.mark.long
@seeds
def test_iql_finds_the_better_actions_of_a_data_set_and_bc_the_usual_ones(
    place: Place, seed: int
) -> None:
    length = recorded(place.path / "tried", "CartPole-v1", [mostly_wrong] * 200)
    options = ("--dataset", "tried", "--seed", seed, "--stop-steps", 60_000)
    by_rewards = ("--reward-scale", 0.1, "--advantage-weight", 10, "--expectile", 0.8)
    small = ("--lr", 0.001, "--model", '{"hidden_sizes": [64, 64], "activation": "relu"}')
    returns = {}
    for algorithm, own in (("bc", ()), ("iql", by_rewards)):
        run = place.run(
            "train", "--algorithm", algorithm, *options, *small, *own, "--run-dir", algorithm
        )
        assert run.status == 0, run.output
        assert_books_balance(place.path / algorithm)
        returns[algorithm] = juggler.evaluate(place.path / algorithm, episodes=30).mean
    assert returns["bc"] < length < 2 * length < returns["iql"], (returns, length)
    place.assert_nothing_is_left()


@pytest.mark.long
@seeds
def test_iql_swings_up_as_the_best_fifth_of_a_data_set_does(place: Place, seed: int) -> None:
    """Box actions: 20 episodes of a rule beside 80 of random actions."""
    recorded(place.path / "tried", "Pendulum-v1", [*[swung_up] * 20, *[at_random] * 80])
    options = ("--dataset", "tried", "--seed", seed, "--stop-steps", 200_000)
    small = ("--lr", 0.001, "--model", '{"hidden_sizes": [64, 64], "activation": "relu"}')
    returns = {}
    for algorithm, own in (("bc", ()), ("iql", ("--reward-scale", 0.1, "--expectile", 0.8))):
        run = place.run(
            "train", "--algorithm", algorithm, *options, *small, *own, "--run-dir", algorithm
        )
        assert run.status == 0, run.output
        assert_books_balance(place.path / algorithm)
        returns[algorithm] = juggler.evaluate(place.path / algorithm, episodes=50, seed=1000).mean
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


@pytest.mark.long
def test_what_cannot_be_learned_from_is_told_before_the_run_has_a_directory(place: Place) -> None:
    written = write(place.path / "shown", random_episodes([3, 4]))
    options = ("train", "--algorithm", "bc", "--dataset", "shown", "--run-dir", "run")
    with_env = ("--env", "CartPole-v1", "--evaluation-seconds", 1)
    other = place.run(*options, *with_env)
    assert other.status == 2, other.output
    line = other.output.strip().splitlines()[-1]
    assert "has observations in Box(-10.0, 10.0, (3,), float32), and the environment" in line
    assert "CartPole-v1 has them in Box([-4.8" in other.output
    unplayed = place.run(*options, "--env", "CartPole-v1")  # evaluations may come later
    assert unplayed.status == 2, unplayed.output
    assert "the environment CartPole-v1 has them in Box([-4.8" in " ".join(unplayed.output.split())
    metadata = written / "data" / "metadata.json"
    spaces = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({**spaces, "total_episodes": 0}))
    empty = place.run(*options)
    assert empty.status == 2, empty.output
    assert "has 0 episodes: nothing to learn from" in empty.output
    (written / "data" / "main_data.hdf5").unlink()
    damaged = place.run(*options)
    assert damaged.status == 2, damaged.output
    assert "shown/data is damaged: No data found" in damaged.output
    assert not (place.path / "run").exists()
    place.assert_nothing_is_left()


@pytest.mark.long
def test_an_episode_that_is_damaged_ends_the_run_and_is_named(place: Place) -> None:
    written = write(place.path / "shown", random_episodes([30, 40, 50]))
    file = written / "data" / "main_data.hdf5"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    run = place.run("train", "--algorithm", "bc", "--dataset", "shown", "--run-dir", "run")
    assert run.status == 1, run.output
    assert "of the data set in" in run.output
    assert "shown/data is damaged" in run.output
    place.assert_nothing_is_left()


def assert_are_whole_episodes_of_cartpole(dataset: Dataset) -> None:
    """Each step leads to the next observation by the rules of the game, from a beginning to an
    end."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    for index in range(len(dataset)):
        episode = dataset.episode(index)
        assert np.abs(episode.observations[0]).max() <= 0.05
        for step in range(len(episode)):
            env.state, env.steps_beyond_terminated = episode.observations[step], None
            after, _, terminated, _, _ = env.step(int(episode.actions[step]))
            np.testing.assert_allclose(episode.observations[step + 1], after, atol=1e-5)
            assert terminated == (episode.terminated and step == len(episode) - 1)
        assert episode.terminated or len(episode) == 500
    env.close()


@pytest.mark.long
def test_what_a_run_samples_is_recorded_whole_whoever_is_killed(place: Place) -> None:
    options = ("--record", "sampled", "--num-env-runners", 2, "--run-dir", "run")
    # With this rate poles fall early for long, so that there are many episodes.
    stops = ("--stop-return", 501, "--lr", 1e-5)
    run = place.start("train", "cartpole", *options, *stops)
    directory, sampled = place.path / "run", place.path / "sampled"

    def begun() -> set[Path]:
        return set(sampled.glob(".envrunner-1-part-1-v0.partial-*/data/main_data.hdf5"))

    before: set[Path] = eventually(begun, 60, lambda: run.output)
    place.worker("envrunner 1").kill()
    # The one in its place removes this part, and begins it anew.
    eventually(lambda: begun() and not begun() & before, 200, lambda: run.output)
    run.interrupt()
    assert run.wait(60) == 130, run.output
    assert_books_balance(directory)
    parts = {each.name for each in sampled.iterdir()}
    assert {"envrunner-0-part-1-v0", "envrunner-1-part-1-v0"} <= parts
    assert not any(name.startswith(".") for name in parts), "nothing half-written"
    first = Dataset(str(sampled))
    assert_are_whole_episodes_of_cartpole(first)
    trained = summary(directory)["env_steps_trained"]
    resumed = place.run("train", "--resume", "run", "--stop-steps", trained + 10_000)
    assert resumed.status == 0, resumed.output
    second = Dataset(str(sampled))
    assert len(second) > len(first) > 64
    added = {each.name for each in sampled.iterdir()} - parts
    assert {name.partition("-part-")[0] for name in added} == {"envrunner-0", "envrunner-1"}
    options = ("--algorithm", "iql", "--dataset", "sampled", "--run-dir", "student")
    learned = place.run("train", *options, "--stop-steps", 2000)
    assert learned.status == 0, learned.output
    again = place.run("train", "cartpole", "--record", "sampled")
    assert again.status == 2, again.output
    assert "is there already, and not an empty directory" in again.output
    place.assert_nothing_is_left()


SLOW = """
import time
from gymnasium.envs.classic_control import CartPoleEnv
from minari.dataset.minari_storage import MinariStorage

named = MinariStorage.update_metadata


def slowly(*arguments, **keywords):
    time.sleep(2)
    return named(*arguments, **keywords)


MinariStorage.update_metadata = slowly


class Poles(CartPoleEnv):
    pass
"""


@pytest.mark.long
def test_a_run_that_ends_waits_for_what_is_recorded(place: Place) -> None:
    """Large parts, slow disks and busy machines take longer than workers may take otherwise."""
    place.write("slow.py", SLOW)
    options = ("--record", "sampled", "--num-env-runners", 1, "--stop-steps", 2_000)
    run = place.run("train", "--env", "slow:Poles", *options, "--run-dir", "run")
    assert run.status == 0, run.output
    assert [part.name for part in (place.path / "sampled").iterdir()] == ["envrunner-0-part-1-v0"]
    place.assert_nothing_is_left()
