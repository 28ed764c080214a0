"""Writes a Minari data set, as a whole or not at all."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.datasets.finding import DATA, DatasetError, must_be_installed, partial_of
from juggler.runtime.wire.structures import from_tree

#: What writing to a full disk has been seen to raise.
_REFUSED = (OSError, RuntimeError)
#: Where Minari keeps the episodes of a data set.
_EPISODES = "main_data.hdf5"
#: What HDF5 needs beside the numbers: at most so much for each of its small files and episodes.
_BESIDE = 1 << 16


class DatasetWriter:
    """Adds episodes to a data set; made by `writing`.

    Attributes:
        steps: of all episodes so far.
    """

    def __init__(
        self,
        place: Path,
        storage: Any,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        self.steps = 0
        self._place, self._storage = place, storage
        self._spaces = observation_space, action_space

    def add(self, *episodes: RecordedEpisode) -> None:
        """Write episodes to the disk. Many at once take half as long as one by one.

        Raises:
            DatasetError: the disk refuses them.
        """
        with _refusals(self._place):
            _reserve(Path(self._storage.data_path, _EPISODES), episodes)
            self._storage.update_episodes([self._buffer(episode) for episode in episodes])
        self.steps += sum(map(len, episodes))

    def _buffer(self, episode: RecordedEpisode) -> Any:
        """An episode as Minari takes it."""
        from minari.data_collector import EpisodeBuffer

        observed, acted = self._spaces
        last = [False] * (len(episode) - 1)
        return EpisodeBuffer(
            observations=from_tree(observed, episode.observations),
            actions=from_tree(acted, episode.actions),
            rewards=episode.rewards.tolist(),
            terminations=[*last, episode.terminated],
            truncations=[*last, not episode.terminated],
        )


@contextmanager
def writing(
    place: Path,
    dataset_id: str,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    env_spec: EnvSpec | None,
    about: dict[str, str],
) -> Iterator[DatasetWriter]:
    """Write a data set, which is there once the context ends well. If it does not, or the process
    is killed, there is none.

    Args:
        place: its directory, which must not exist.
        dataset_id: its name in Minari, such as "juggler/cartpole-v0".
        observation_space: of the environment.
        action_space: of the environment.
        env_spec: of the environment, if Gymnasium can make it again.
        about: more of Minari's metadata, such as "algorithm_name".

    Raises:
        DatasetError: the place is taken, the disk refuses writes, or the package minari is missing.
    """
    must_be_installed()
    from minari.dataset.minari_storage import MinariStorage

    if place.exists():
        raise DatasetError(f"{place} is there already: choose another place, or remove it")
    place = place.absolute()  # Minari appends a relative one to itself
    partial = place.with_name(f".{place.name}.partial-{os.getpid()}")
    try:
        with _refusals(place):
            _remove_of_dead(place)
            (partial / DATA).mkdir(parents=True)
            storage = MinariStorage.new(
                partial / DATA,
                observation_space,
                action_space,
                env_spec,
                jpeg_encoding=False,  # images as they were seen
            )
            (partial / DATA / _EPISODES).write_bytes(_empty_file())
        yield DatasetWriter(place, storage, observation_space, action_space)
        with _refusals(place):
            # Readers take none without a name.
            named = {"dataset_id": dataset_id, "minari_version": version("minari"), **about}
            storage.update_metadata(named)
            for file in (partial / DATA).iterdir():
                _to_disk(file)
            partial.rename(place)
            _to_disk(place.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _reserve(file: Path, episodes: Sequence[RecordedEpisode]) -> None:
    """Have the disk keep room for episodes. HDF5 crashes where a disk is full while it writes; what
    it does not need, it gives back when it closes the file.

    Raises:
        OSError: there is no room.
    """
    numbers = sum(2 * each.nbytes + 16 * len(each) for each in episodes)
    with file.open("r+b") as opened:
        end = opened.seek(0, os.SEEK_END)
        os.posix_fallocate(opened.fileno(), end, numbers + _BESIDE * (1 + len(episodes)))


def _empty_file() -> bytes:
    """An HDF5 file without episodes."""
    import h5py

    content = io.BytesIO()
    with h5py.File(content, "w", track_order=True):
        pass
    return content.getvalue()


@contextmanager
def _refusals(place: Path) -> Iterator[None]:
    try:
        yield
    except _REFUSED as error:
        code = getattr(error, "errno", None)  # HDF5 says much more, over several lines
        why = os.strerror(code) if code else str(error).partition("\n")[0]
        raise DatasetError(
            f"cannot write the data set {place}, of which nothing is kept: {why}"
        ) from error


def _remove_of_dead(place: Path) -> None:
    """Remove what killed processes have left of this data set."""
    for left in place.parent.glob(partial_of(place.name)):
        if not Path("/proc", left.name.rpartition("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
