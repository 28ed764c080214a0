"""Episodes that are recorded, written, read and sampled again."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from support.episode_views import Episode, episodes_of
from support.random_episodes import CHOICES, VECTOR, random_episodes, write

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.datasets import dataset_writer
from juggler.envrunner.datasets.dataset_writer import (
    OVERHEAD_BYTES,
    EpisodesUnderWay,
    RecordedWhilePlayed,
    SampledEpisodes,
    writing,
)
from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.connector import ActionConnector
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.datasets.dataset import Dataset, DatasetError, RecordedEpisode
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import flatten

minari = pytest.importorskip("minari", reason="needs juggler[datasets]")

IMAGE = spaces.Box(0, 255, (40, 40, 3), np.uint8)
SPACES: dict[str, tuple[gymnasium.Space[Any], gymnasium.Space[Any]]] = {
    "choices": (VECTOR, CHOICES),
    "numbers": (spaces.Discrete(5), spaces.Box(-2, 2, (2,), np.float64)),
    "an image": (IMAGE, spaces.MultiBinary(3)),
    "parts": (
        spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(3)}),
        spaces.Tuple([CHOICES, spaces.Box(0, 1, (), np.float32)]),
    ),
    "several choices": (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([4, 2], start=[1, 0])),
}


@pytest.mark.parametrize("name", SPACES)
def test_episodes_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    written = random_episodes([3, 1, 5], *SPACES[name])
    dataset = Dataset(str(write(tmp_path / "mine", written, *SPACES[name])))
    assert (dataset.observation_space, dataset.action_space) == SPACES[name]
    assert len(dataset) == 3
    for index, expected in enumerate(written):
        found = dataset.episode(index)
        tree_map(np.testing.assert_array_equal, found.observations, expected.observations)
        tree_map(np.testing.assert_array_equal, found.actions, expected.actions)
        np.testing.assert_array_equal(found.rewards, expected.rewards)
        assert found.terminated == expected.terminated


def test_minari_itself_reads_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    written = random_episodes([3, 4])
    write(tmp_path / "juggler" / "random-v0", written, env="CartPole-v1")
    found = minari.load_dataset("juggler/random-v0")
    assert found.env_spec.id == "CartPole-v1"
    assert list(minari.list_local_datasets()) == ["juggler/random-v0"]
    assert (found.total_episodes, found.total_steps) == (2, 7)
    for expected, episode in zip(written, found, strict=True):
        np.testing.assert_array_equal(episode.observations, expected.observations)
        np.testing.assert_array_equal(
            episode.truncations, [False] * (len(expected) - 1) + [not expected.terminated]
        )
    assert len(Dataset("juggler/random-v0")) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("actions", [1, 2, 4, 1]), "its actions hold a number outside"),
        (("actions", [1, 2]), r"its actions have the shape \[2\]"),
        (("observations", np.zeros((5, 2))), r"its observations have the shape \[5, 2\]"),
        (("terminations", [False, True, False, False]), "continues after its end"),
        (("rewards", [1.0]), r"have the shapes \[1\], \[4\], \[4\]"),
        (("rewards", None), "is damaged: .*rewards"),
    ],
)
def test_a_damaged_episode_is_named(change: tuple[str, Any], said: str, tmp_path: Path) -> None:
    place = write(tmp_path / "mine", random_episodes([4]))
    column, values = change
    with h5py.File(place / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0"][column]
        if values is not None:
            file["episode_0"][column] = values
    with pytest.raises(DatasetError, match=rf"episode 0 of the data set in .*{said}"):
        Dataset(str(place)).episode(0)


def columns_of(episode: RecordedEpisode) -> dict[str, Any]:
    return {
        "observations": episode.observations,
        "actions": episode.actions,
        "rewards": episode.rewards,
    }


NUMBERS = spaces.Box(-2, 2, (2,), np.float32)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("column", ["observations/place", "actions", "rewards"])
def test_an_episode_with_a_number_that_is_not_finite_is_named(
    column: str, number: float, tmp_path: Path
) -> None:
    both = spaces.Dict({"place": VECTOR, "seen": spaces.Discrete(4)}), NUMBERS
    written = random_episodes([3, 3, 3], *both)
    for path, array in flatten(columns_of(written[1])):
        if "/".join(path) == column:
            array[2] = number
    dataset = Dataset(str(write(tmp_path / "mine", written, *both)))
    everything = ("observations", "actions", "rewards")
    assert len(dataset.episode(0, everything)) == len(dataset.episode(2, everything)) == 3
    words = rf"episode 1 of .*mine/data holds a number that is not finite, in its {column}$"
    with pytest.raises(DatasetError, match=words):
        dataset.episode(1, everything)
    unread = [name for name in everything if not column.startswith(name)]
    assert len(dataset.episode(1, unread)) == 3


def test_a_missing_h5py_says_how_juggler_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write(tmp_path / "mine", random_episodes([2]))
    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.delitem(sys.modules, "minari.dataset._storages.hdf5_storage")
    with pytest.raises(DatasetError, match="needs the package h5py"):
        Dataset(str(place))


def test_a_place_that_is_taken_is_left_as_it_is(tmp_path: Path) -> None:
    place = write(tmp_path / "mine", random_episodes([2]))
    with pytest.raises(DatasetError, match="mine is there already: choose"):
        write(place, random_episodes([2, 2]))
    assert len(Dataset(str(place))) == 1


def test_what_ends_early_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        about = VECTOR, CHOICES, None, {}
        with writing(tmp_path / "mine", "juggler/random-v0", *about) as writer:
            writer.add(random_episodes([2])[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_what_a_process_of_the_same_id_has_left_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / f".mine.partial-{os.getpid()}" / "data"  # as the next container has it
    left.mkdir(parents=True)
    (left / "main_data.hdf5").touch()
    with pytest.raises(DatasetError, match="there is no data set"):
        Dataset(str(tmp_path / "mine"))
    write(tmp_path / "mine", random_episodes([2]))
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_what_is_still_being_written_stays(tmp_path: Path) -> None:
    place, about = tmp_path / "mine", (VECTOR, CHOICES, None, {})
    with ExitStack() as first:
        writer = first.enter_context(writing(place, "juggler/random-v0", *about))
        write(place, random_episodes([2]))  # as another container does
        writer.add(random_episodes([3])[0])
        with pytest.raises(DatasetError, match="which nothing is kept: Directory not empty"):
            first.close()
    assert len(Dataset(str(place)).episode(0)) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("key", ["a/b", "", "."])
def test_a_key_that_would_be_lost_is_refused_before_anything_is_made(
    key: str, tmp_path: Path
) -> None:
    actions = spaces.Tuple([CHOICES, spaces.Dict({key: CHOICES})])
    with pytest.raises(DatasetError, match=rf"cannot hold actions with the key '{key}': choose"):
        write(tmp_path / "mine", random_episodes([2], action_space=actions), action_space=actions)
    assert not list(tmp_path.iterdir())


# EnvRunners record samples as their environments saw them, in whole parts.


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


def recorder(place: Path, told: list[str], worker: str = "envrunner-0") -> SampledEpisodes:
    """Of episodes with the spaces of `random_episodes`."""
    config = EnvRunnerConfig(record=str(place))
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


# A sampler over a data set: its batches hold whole episodes.


ROWS, STEPS = 3, 5
RECORDED_LENGTHS = [1, 4, 7, 12, 2, 5]


def sampler_of(
    place: Path,
    connectors: dict[str, Any] | None = None,
    module: Any = None,
    seed: int = 0,
    own: dict[str, Any] | None = None,
) -> Sampler:
    envs = RecordedEnvs(Dataset(str(place)), ROWS)
    both = envs.single_observation_space, envs.single_action_space
    env_to_module, module_to_env = build_runner_pipelines(
        ConnectorsConfig.parse(connectors or {}), *both, own
    )
    seen = env_to_module.module_observation_space, module_to_env.action_space
    built = module(*seen) if module else build_module(None, *seen, {"hidden_sizes": [4]})
    policy = Actor(built, envs.num_envs, STEPS, seed, module_to_env, env_to_module)
    return Sampler(envs, policy, STEPS, seed)


def test_recorded_environments_can_be_closed_with_gymnasiums_options(tmp_path: Path) -> None:
    place = write(tmp_path / "mine", random_episodes([2]))
    RecordedEnvs(Dataset(str(place)), ROWS).close(timeout=1.0, terminate=True)


def stretches(batches: list[EpisodeBatch]) -> dict[int, list[Episode]]:
    """The parts of each episode, by its id, in their order."""
    found: dict[int, list[Episode]] = {}
    for batch in batches:
        for part in episodes_of(batch):
            found.setdefault(part.episode_id, []).append(part)
    return {key: sorted(parts, key=lambda part: part.offset) for key, parts in found.items()}


def whole(parts: list[Episode]) -> bool:
    return parts[0].offset == 0 and (parts[-1].terminated or parts[-1].truncated)


def joined(parts: list[Episode], column: str) -> np.ndarray:
    return np.concatenate([getattr(part, column) for part in parts])


def matching(parts: list[Episode], episodes: list[RecordedEpisode]) -> int:
    """Which of the recorded episodes these are the parts of."""
    rewards = joined(parts, "rewards")
    (index,) = (i for i, each in enumerate(episodes) if np.array_equal(each.rewards, rewards))
    return index


def test_batches_hold_every_episode_once_in_each_pass(tmp_path: Path) -> None:
    written = random_episodes(RECORDED_LENGTHS)
    sampler = sampler_of(write(tmp_path / "mine", written))
    batches = [sampler.sample((0, 0)).batch for _ in range(20)]
    for batch in batches:
        EpisodeBatch.from_tree(batch.to_tree())
        assert batch.live.all()
        assert not batch.action_logp.any()
    times: Counter[int] = Counter()
    for parts in stretches(batches).values():
        if not whole(parts):
            continue
        index = matching(parts, written)
        times[index] += 1
        episode = written[index]
        observations = joined(parts, "observations")
        np.testing.assert_array_equal(observations, episode.observations[:-1])
        np.testing.assert_array_equal(joined(parts, "actions"), episode.actions)
        assert parts[-1].terminated == episode.terminated
        assert parts[-1].truncated == (not episode.terminated)
        if not episode.terminated:
            np.testing.assert_array_equal(parts[-1].last_observation, episode.observations[-1])
    assert times.keys() == set(range(len(RECORDED_LENGTHS)))
    # Three run at once, and may be of two passes.
    assert max(times.values()) - min(times.values()) <= 2
    assert min(times.values()) >= 8


def test_the_order_follows_the_seed(tmp_path: Path) -> None:
    place = write(tmp_path / "mine", random_episodes(RECORDED_LENGTHS))
    orders = []
    for seed in (1, 1, 2):
        sampler = sampler_of(place, seed=seed)
        orders.append(np.concatenate([sampler.sample((0, 0)).batch.rewards for _ in range(6)], 1))
    np.testing.assert_array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


def test_actions_are_what_the_policy_would_have_chosen(tmp_path: Path) -> None:
    space = spaces.Tuple([spaces.Box(-2, 6, (2,), np.float64), CHOICES])
    written = random_episodes([4, 4, 4], action_space=space)
    place = write(tmp_path / "mine", written, action_space=space)
    sampler = sampler_of(place, {"module_to_env": ["rescale_actions"]})
    batch = sampler.sample((0, 0)).batch
    for parts in stretches([batch]).values():
        (part,) = parts
        (index,) = (i for i, each in enumerate(written) if each.rewards[0] == part.rewards[0])
        of_env, count = written[index].actions, len(part)
        numbers = np.asarray(part.actions["0"], np.float64) * 4 + 2
        np.testing.assert_allclose(numbers, of_env["0"][:count], rtol=1e-6, atol=1e-6)
        assert part.actions["0"].dtype == np.float32
        np.testing.assert_array_equal(part.actions["1"], of_env["1"][:count])


class Halved(ActionConnector):
    def __call__(self, actions: Any) -> Any:
        return actions / 2


def test_a_connector_that_cannot_be_undone_is_named(tmp_path: Path) -> None:
    space = spaces.Box(-1, 1, (1,), np.float32)
    place = write(tmp_path / "mine", random_episodes([2], action_space=space), action_space=space)
    envs = RecordedEnvs(Dataset(str(place)), ROWS)
    connectors = ConnectorsConfig.parse({"module_to_env": ["own:halved"]})
    _, module_to_env = build_runner_pipelines(connectors, VECTOR, space, {"own:halved": Halved})
    module = build_module(None, VECTOR, space, {"hidden_sizes": [4]})
    with pytest.raises(NotImplementedError, match="connector Halved has no"):
        Sampler(envs, Actor(module, ROWS, STEPS, 0, module_to_env), STEPS, 0)


def test_a_damaged_episode_ends_the_run_and_is_named(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    place = write(tmp_path / "mine", random_episodes([2, 2]))
    with h5py.File(place / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1"]["actions"]
    with pytest.raises(EnvironmentFailed, match=r"failed in reading: episode 1 of") as raised:
        sampler_of(place)
    assert raised.value.lasting


@pytest.mark.parametrize("column", ["actions", "rewards"])
def test_an_episode_with_actions_or_rewards_that_are_not_finite_is_named(
    column: str, tmp_path: Path
) -> None:
    acted = spaces.Box(-1, 1, (2,), np.float32)
    episodes = random_episodes([2, 2], VECTOR, acted)
    getattr(episodes[1], column)[0] = np.nan
    place = write(tmp_path / "mine", episodes, VECTOR, acted)
    with pytest.raises(EnvironmentFailed, match=rf"episode 1 of .* not finite, in its {column}"):
        sampler_of(place)


def test_another_environment_is_told_with_both_spaces(tmp_path: Path) -> None:
    dataset = Dataset(str(write(tmp_path / "mine", random_episodes([2]))))
    envs = gymnasium.make_vec("CartPole-v1", 1)
    with pytest.raises(ValueError, match=r"data set .* has observations in"):
        dataset.must_have_the_spaces_of("CartPole-v1", envs)
    envs.close()
