"""Data sets are written completely or not at all."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.random_episodes import CHOICES, VECTOR, random_episodes, write

from juggler.envrunner.datasets.dataset_writer import writing
from juggler.runtime.datasets.dataset import Dataset, DatasetError, RecordedEpisode
from juggler.runtime.wire.structures import tree_map
from juggler.runtime.wire.trees import flatten

pytest.importorskip("minari", reason="needs juggler[datasets]")
import h5py
import minari

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
