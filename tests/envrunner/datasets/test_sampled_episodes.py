"""EnvRunners record samples as their environments saw them, in whole parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from support.random_episodes import CHOICES, VECTOR, random_episodes, write

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.datasets import dataset_writer
from juggler.envrunner.datasets.dataset_writer import (
    OVERHEAD_BYTES,
    EpisodesUnderWay,
    RecordedWhilePlayed,
    SampledEpisodes,
)
from juggler.runtime.datasets.dataset import Dataset, DatasetError, RecordedEpisode

pytest.importorskip("minari", reason="needs juggler[datasets]")

LENGTHS = ((3, True), (1, False), (5, False), (2, True))


class Diary(gymnasium.Env[Any, Any]):
    """Writes down its episodes, of different lengths, some of them truncated."""

    observation_space = spaces.Dict({"place": VECTOR, "seen": spaces.Discrete(100)})
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, number: int, written: list[RecordedEpisode]) -> None:
        self._written, self._episode = written, number
        self._generator = np.random.default_rng(number)

    def _seen(self) -> dict[str, Any]:
        shown = {
            "place": self._generator.uniform(-10, 10, 3).astype(np.float32),
            "seen": np.int64(self._generator.integers(100)),
        }
        self._observations.append(shown)
        return shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._episode += 1
        self._observations: list[dict[str, Any]] = []
        self._actions: list[NDArray[Any]] = []
        self._rewards: list[float] = []
        return self._seen(), {}

    def step(self, action: NDArray[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._actions.append(np.copy(action))
        self._rewards.append(float(self._generator.normal()))
        length, terminates = LENGTHS[self._episode % len(LENGTHS)]
        seen, over = self._seen(), len(self._actions) == length
        if over:
            keys = self._observations[0]
            observations = {
                key: np.stack([each[key] for each in self._observations]) for key in keys
            }
            rewards = np.array(self._rewards, np.float32)
            self._written.append(
                RecordedEpisode(observations, np.stack(self._actions), rewards, terminates)
            )
        return seen, self._rewards[-1], over and terminates, over and not terminates, {}


def recorder(
    place: Path, told: list[str], record_gb: float | None = None, worker: str = "envrunner-0"
) -> SampledEpisodes:
    """Of episodes with the spaces of `random_episodes`."""
    config = EnvRunnerConfig(record=str(place), record_gb=record_gb)
    return SampledEpisodes(config, worker, VECTOR, CHOICES, None, told.append)


def lengths_in(place: Path) -> list[int]:
    dataset = Dataset(str(place))
    return [len(dataset.episode(index)) for index in range(len(dataset))]


def assert_same(found: RecordedEpisode, expected: RecordedEpisode) -> None:
    assert found.terminated == expected.terminated
    np.testing.assert_array_equal(found.rewards, expected.rewards)
    np.testing.assert_array_equal(found.actions, expected.actions)
    for key in expected.observations:
        np.testing.assert_array_equal(found.observations[key], expected.observations[key])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_whole_episode_is_recorded_as_its_environment_saw_it(
    mode: AutoresetMode, tmp_path: Path
) -> None:
    written: list[RecordedEpisode] = []
    told: list[str] = []
    vector = SyncVectorEnv(
        [lambda i=i: Diary(i, written) for i in range(3)], autoreset_mode=mode, copy=False
    )
    both = vector.single_observation_space, vector.single_action_space
    config = EnvRunnerConfig(record=str(tmp_path / "sampled"))
    episodes = SampledEpisodes(config, "envrunner-0", *both, None, told.append)
    envs = RecordedWhilePlayed(vector, episodes)
    generator = np.random.default_rng(0)
    envs.reset(seed=0)
    for step in range(40):
        if step == 20:
            envs.reset(seed=1)  # what is running is in no data set
        actions = generator.uniform(-1, 1, (3, 2)).astype(np.float32)
        _, _, terminated, truncated, _ = envs.step(actions)
        actions[:] = np.nan  # no batch keeps a view of it
        over = terminated | truncated
        if mode is AutoresetMode.DISABLED and over.any():
            envs.reset(options={"reset_mask": over})
    envs.close()
    dataset = Dataset(str(tmp_path / "sampled"))
    assert len(dataset) == len(written) > 20
    for index, expected in enumerate(written):
        assert_same(dataset.episode(index), expected)
    assert told == []


def test_parts_of_several_env_runners_are_one_data_set(tmp_path: Path) -> None:
    told: list[str] = []
    first = recorder(tmp_path, told)
    for episode in random_episodes([3, 1]):
        first.add(episode)
        first.complete()
    second = recorder(tmp_path, told, worker="envrunner-11")
    second.add(random_episodes([7])[0])
    second.complete()
    again = recorder(tmp_path, told)  # the first one has come back
    again.add(random_episodes([9])[0])
    again.complete()
    again.complete()  # nothing waits
    parts = [f"envrunner-0-part-{number}-v0" for number in (1, 2, 3)]
    assert sorted(each.name for each in tmp_path.iterdir()) == [*parts, "envrunner-11-part-1-v0"]
    assert lengths_in(tmp_path) == [3, 1, 9, 7]
    assert told == []


def test_a_part_is_complete_when_its_first_episode_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(dataset_writer.time, "monotonic", lambda: now)
    episodes = recorder(tmp_path, [])
    for count in (1, 66):  # they are written 64 at a time, and one or two wait
        for episode in random_episodes([2] * count):
            episodes.add(episode)
            now += 0.5
        episodes.complete_if_old()
        parts = len(list(tmp_path.iterdir()))
        now += 59.4 - 0.5 * count
        episodes.complete_if_old()
        assert len(list(tmp_path.iterdir())) == parts
        now += 0.7
        episodes.complete_if_old()
        episodes.complete_if_old()
    assert len(lengths_in(tmp_path)) == 67
    assert sorted(each.name for each in tmp_path.iterdir())[-1] == "envrunner-0-part-2-v0"


def bytes_in(place: Path) -> int:
    return sum(file.stat().st_size for file in place.glob("*/data/*"))


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many episodes are written together."""
    monkeypatch.setattr(dataset_writer, "_TOGETHER", 8)
    return 8


def test_no_more_is_recorded_than_was_asked_for(tmp_path: Path, few_at_once: int) -> None:
    told: list[str] = []
    each, most = random_episodes([2])[0], 1_000_000
    episodes = recorder(tmp_path, told, record_gb=most / 1e9)
    for _ in range(150):
        episodes.add(each)
    count, taken = len(Dataset(str(tmp_path))), bytes_in(tmp_path)
    at_once = few_at_once * taken / count
    assert most - at_once < taken < most + at_once
    assert told == ["records no more episodes, and samples on: there are record_gb = 0.001 of them"]
    again = recorder(tmp_path, told, record_gb=most / 1e9)
    again.add(each)
    again.complete()
    assert len(Dataset(str(tmp_path))) == count, "what there was before counts"


@pytest.mark.parametrize("key", ["a/b", "", "."])
def test_observations_that_no_data_set_can_hold_are_told_at_the_start(
    key: str, tmp_path: Path
) -> None:
    observations = spaces.Dict({"inner": spaces.Dict({key: VECTOR})})
    config = EnvRunnerConfig(record=str(tmp_path / "sampled"))
    with pytest.raises(DatasetError, match=rf"cannot hold observations with the key '{key}'"):
        SampledEpisodes(config, "envrunner-0", observations, CHOICES, None, print)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_a_part_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "file").write_text("no directory")
    episodes = recorder(tmp_path / "file" / "sampled", told)
    for episode in random_episodes([2] * 200):
        episodes.add(episode)
    episodes.complete()
    assert len(told) == 1
    assert told[0].startswith("records no more episodes, and samples on: cannot write the data set")
    assert told[0].endswith("of which nothing is kept: Not a directory")


def test_an_episode_without_an_end_is_cut_where_it_takes_too_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataset_writer, "MOST_BYTES", 4 * (12 + 8 + 2 * OVERHEAD_BYTES))
    cut: list[RecordedEpisode] = []
    under_way = EpisodesUnderWay(cut.append)
    seen = np.arange(30, dtype=np.float32).reshape(10, 3)
    for step in range(9):
        under_way.step(5, seen[step], np.array(step), float(step))
    assert [len(each) for each in cut] == [4, 4]
    assert not any(each.terminated for each in cut)
    np.testing.assert_array_equal(cut[1].observations, seen[4:9])
    assert cut[1].rewards.tolist() == [4, 5, 6, 7]
    under_way.end(5, seen[9], terminated=True)
    np.testing.assert_array_equal(cut[2].observations, seen[8:])
    under_way.end(5, seen[9], terminated=True)  # there is none any more
    assert len(cut) == 3


@pytest.mark.parametrize("width", [0, 3], ids=["empty observations", "vectors"])
def test_all_episodes_together_take_no_more_memory_than_they_may(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_bytes, steps, rng = 4 * width + 8 + 2 * OVERHEAD_BYTES, 3000, np.random.default_rng(0)
    found: list[RecordedEpisode] = []
    most = 50 * step_bytes
    monkeypatch.setattr(dataset_writer, "MOST_BYTES", most)
    under_way = EpisodesUnderWay(found.append)
    played = [0] * 20
    for step in range(steps):
        place = int(rng.integers(20)) if step % 2 else 7  # one plays much more than the others
        seen = np.full(width, step, np.float32)
        under_way.step(place, seen, np.array(step), float(step))
        played[place] += 1
        held = sum(len(each.rewards) for each in under_way._running.values())
        assert held * step_bytes == under_way._bytes <= most
        if step == 2000:
            played[3] -= len(under_way._running[3].rewards)
            under_way.drop(3)
    for place in range(20):
        under_way.end(place, np.zeros(width, np.float32), terminated=True)
    assert under_way._bytes == 0
    assert sum(map(len, found)) == sum(played), "no step is lost or there twice"
    assert 1 < max(map(len, found)) < 50
    for each in found:
        np.testing.assert_array_equal(each.actions, each.rewards)
        if width:
            np.testing.assert_array_equal(each.observations[:-1, 0], each.rewards)
        assert each.terminated or not width or each.observations[-1, 0] > each.rewards[-1]


def test_parts_of_other_environments_are_told(tmp_path: Path) -> None:
    write(tmp_path / "envrunner-0-part-1-v0", random_episodes([2]))
    other = VECTOR, spaces.Discrete(5)
    write(tmp_path / "envrunner-1-part-1-v0", random_episodes([2], *other), *other)
    with pytest.raises(DatasetError, match=r"envrunner-1-part-1-v0/data has other spaces than"):
        Dataset(str(tmp_path))


def test_what_cannot_be_recorded_is_told() -> None:
    config = EnvRunnerConfig()
    for most in (0, -1, float("nan"), True):
        with pytest.raises(ValueError, match="record_gb must be a number of"):
            replace(config, record_gb=most).validate()
