"""Records episodes, and writes them as Minari data sets."""

from __future__ import annotations

import copy
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.autoreset import autoreset_mode, last_observation
from juggler.envrunner.environments.find_environment import EnvironmentFactory, find_environment
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.datasets.dataset import (
    DATA,
    DatasetError,
    RecordedEpisode,
    must_be_installed,
    partial_of,
)
from juggler.runtime.modules.import_by_name import SCRIPT
from juggler.runtime.plain_files import try_lock
from juggler.runtime.wire.structures import from_tree, space_leaves, to_tree, tree_map
from juggler.runtime.wire.trees import Tree, flatten

#: When all running episodes need more, the longest is cut: some environments never end one.
MOST_BYTES = 512 * 1024 * 1024
#: Bytes that Python needs per array of a step, in addition to its numbers.
OVERHEAD_BYTES = 256


@dataclass(slots=True)
class _Running:
    """The steps of an episode so far."""

    step_bytes: int
    observations: list[Tree] = field(default_factory=list)
    actions: list[Tree] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.step_bytes * len(self.rewards)


class EpisodesUnderWay:
    """Collects the running episodes, one per place.

    When they have too many bytes, the longest is cut before its last step, as if it were truncated.
    That step begins a new episode. A single step is not cut.

    Args:
        take: called with each episode when it ends.
    """

    def __init__(self, take: Callable[[RecordedEpisode], None]) -> None:
        self._take = take
        self._running: dict[int, _Running] = {}
        self._bytes = 0  # of all running episodes

    def step(self, place: int, observation: Tree, action: Tree, reward: float) -> None:
        """Add a step. Nothing else may write to its arrays.

        Args:
            observation: [...] that the step was taken from.
            action: [...]
        """
        self._add(place, observation, action, reward)
        if self._bytes > MOST_BYTES:
            self._cut(max(self._running, key=lambda each: self._running[each].nbytes))

    def end(self, place: int, observation: Tree | None, *, terminated: bool) -> None:
        """End the episode at a place, if it has steps.

        Args:
            observation: [...] after its last step; None: unknown, which only a terminated
                episode allows.
            terminated: the environment ended it; otherwise it was cut off.
        """
        running = self.drop(place)
        if running is None:
            return
        last = running.observations[-1] if observation is None else observation
        episode = RecordedEpisode(
            tree_map(_over_steps, *running.observations, last),
            tree_map(_over_steps, *running.actions),
            np.array(running.rewards, np.float32),
            terminated,
        )
        self._take(episode)

    def drop(self, place: int) -> _Running | None:
        """Drop the episode at a place, if any."""
        running = self._running.pop(place, None)
        self._bytes -= running.nbytes if running else 0
        return running

    def _add(self, place: int, observation: Tree, action: Tree, reward: float) -> None:
        running = self._running.get(place)
        if running is None:
            each = _bytes_of(observation) + _bytes_of(action)
            running = self._running[place] = _Running(each)
        running.observations.append(observation)
        running.actions.append(action)
        running.rewards.append(reward)
        self._bytes += running.step_bytes

    def _cut(self, place: int) -> None:
        """Move an episode's last step to a new one.

        Does nothing if it is the only step.
        """
        running = self._running[place]
        if len(running.rewards) < 2:
            return
        last = running.observations.pop(), running.actions.pop(), running.rewards.pop()
        self._bytes -= running.step_bytes
        self.end(place, last[0], terminated=False)
        self._add(place, *last)


class EpisodeRecorder(VectorWrapper):
    """A vector of environments that records whole episodes while they are played.

    Args:
        take: called with each episode when it ends.
        shares: [N] number of episodes to record per environment; None: all.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        take: Callable[[RecordedEpisode], None],
        shares: NDArray[np.intp] | None = None,
    ) -> None:
        super().__init__(env)
        self._mode = autoreset_mode(env)
        self._observed, self._acted = env.single_observation_space, env.single_action_space
        self._under_way = EpisodesUnderWay(take)
        self._left = np.full(self.num_envs, np.inf) if shares is None else shares.copy()  # [N]
        self._resets = np.zeros(self.num_envs, np.bool_)  # [N] the next step only resets
        self._before: Tree = {}

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        everywhere = np.ones(self.num_envs, np.bool_)  # [N]
        for row in np.flatnonzero((options or {}).get("reset_mask", everywhere)).tolist():
            self._under_way.drop(row)
        observations, infos = self.env.reset(seed=seed, options=options)
        self._resets[:] = False
        self._see(observations)
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = self.env.step(actions)
        observations, rewards, terminated, truncated, infos = result
        acted = to_tree(self._acted, actions)
        recorded = ~self._resets & (self._left > 0)  # [N]
        for row in np.flatnonzero(recorded).tolist():
            reward = float(rewards[row])
            self._under_way.step(row, row_of(self._before, row), row_of(acted, row), reward)
            # The observation after an end is not where the next step starts.
            if terminated[row] or truncated[row]:
                ended = bool(terminated[row])
                last = self._last(observations, infos, row, terminated=ended)
                self._left[row] -= 1
                self._under_way.end(row, last, terminated=ended)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resets = (terminated | truncated) & ~self._resets  # [N]
        self._see(observations)
        return result

    def _see(self, observations: Any) -> None:
        """Keep the observations [N, ...] that the next step is taken from."""
        # Environments may write the next ones into the same memory.
        self._before = tree_map(np.copy, to_tree(self._observed, observations))

    def _last(
        self, observations: Any, infos: dict[str, Any], row: int, *, terminated: bool
    ) -> Tree | None:
        """Return an episode's last observation [...]; None if it terminated without one."""
        if self._mode is AutoresetMode.SAME_STEP:
            last = last_observation(self._observed, infos, row, terminated=terminated)
            return None if last is None else tree_map(np.array, last)
        return row_of(to_tree(self._observed, observations), row)


def row_of(batch: Tree, row: int) -> Tree:
    """Copy one row [...] of a batch [N, ...]."""
    copied: Tree = tree_map(lambda leaf: np.array(leaf[row]), batch)
    return copied


def _bytes_of(tree: Tree) -> int:
    return sum(leaf.nbytes + OVERHEAD_BYTES for _, leaf in flatten(tree))


def _over_steps(*leaves: NDArray[Any]) -> NDArray[Any]:
    """Stack L arrays [...] to [L, ...]."""
    return np.stack(leaves)


#: Exceptions seen when writing to a full disk.
_REFUSED = (OSError, RuntimeError)
#: Where Minari keeps the episodes of a data set.
_EPISODES = "main_data.hdf5"
#: Maximum overhead of HDF5 in bytes, per write and per episode.
_OVERHEAD_BYTES = 1 << 16


class DatasetWriter:
    """Adds episodes to a data set; made by `writing`."""

    def __init__(
        self,
        place: Path,
        storage: Any,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        self.nbytes = 0
        self._place, self._storage = place, storage
        self._spaces = observation_space, action_space

    def add(self, *episodes: RecordedEpisode) -> None:
        """Write episodes to the disk.

        Many at once take half as long as one by one.

        Raises:
            DatasetError: the disk refuses them.
        """
        with _refusals(self._place):
            _reserve(Path(self._storage.data_path, _EPISODES), episodes)
            self._storage.update_episodes([self._buffer(episode) for episode in episodes])
            self.nbytes = bytes_of(Path(self._storage.data_path).iterdir())

    def _buffer(self, episode: RecordedEpisode) -> Any:
        """Convert an episode to Minari's buffer."""
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
    """Write a data set, which appears once the context ends well.

    Otherwise, or if the process is killed, no data set is left.

    Args:
        place: its directory, which must not exist.
        dataset_id: its name in Minari, such as "juggler/cartpole-v0".
        env_spec: of the environment, if Gymnasium can make it again.
        about: more of Minari's metadata, such as "algorithm_name".

    Raises:
        DatasetError: the place is taken, the disk refuses writes, or as `must_be_recordable`.
    """
    must_be_recordable(observation_space, action_space)
    from minari.dataset.minari_storage import MinariStorage

    if place.exists():
        raise DatasetError(f"{place} is there already: choose another place, or remove it")
    place = place.absolute()  # Minari appends a relative one to itself
    # The lock is held until the data set has its place, or is gone.
    with ExitStack() as held:
        with _refusals(place):
            _remove_abandoned(place)
            partial = held.enter_context(_held_directory(place))
            (partial / DATA).mkdir()
            storage = MinariStorage.new(
                partial / DATA,
                observation_space,
                action_space,
                env_spec,
                jpeg_encoding=False,  # images without loss
            )
            (partial / DATA / _EPISODES).write_bytes(_empty_file())
        # Outside of `_refusals`, because the caller's own errors are not the disk's.
        yield DatasetWriter(place, storage, observation_space, action_space)
        with _refusals(place):
            # Readers reject a data set without a name.
            named = {"dataset_id": dataset_id, "minari_version": version("minari"), **about}
            storage.update_metadata(named)
            for file in (partial / DATA).iterdir():
                _to_disk(file)
            partial.rename(place)
            _to_disk(place.parent)


def must_be_recordable(
    observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> None:
    """Check that a data set can hold values of these spaces.

    Raises:
        DatasetError: the package minari is missing, or a key of these spaces would be lost.
    """
    must_be_installed()
    for what, space in (("observations", observation_space), ("actions", action_space)):
        for path, _ in space_leaves(space):
            for key in path:
                if key in ("", ".") or "/" in key:  # HDF5 would read it as a path
                    raise DatasetError(
                        f"a data set cannot hold {what} with the key {key!r}: choose a key "
                        "without '/' that is neither empty nor '.'"
                    )


@contextmanager
def _held_directory(place: Path) -> Iterator[Path]:
    """Make a locked (flock) directory next to a place.

    The process holds the lock while it writes. A process id would mean nothing in another container
    that shares the place.
    """
    partial = place.with_name(f".{place.name}.partial-{token_hex(4)}")
    partial.mkdir(parents=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try_lock(descriptor)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(place: Path) -> None:
    """Remove partial copies of this data set that killed processes left.

    Directories that a process holds, or that cannot be opened, stay.
    """
    # A directory without data may be new, and not locked yet.
    for data in place.parent.glob(f"{partial_of(place.name)}/{DATA}"):
        with suppress(OSError):
            descriptor = os.open(data.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(data.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def bytes_of(files: Iterable[Path]) -> int:
    """Return the total size of files."""
    return sum(file.stat().st_size for file in files)


def _reserve(file: Path, episodes: Sequence[RecordedEpisode]) -> None:
    """Reserve disk space for episodes.

    HDF5 crashes if the disk fills up while it writes. Closing the file releases unused space.
    """
    numbers = sum(2 * each.nbytes + 16 * len(each) for each in episodes)
    with file.open("r+b") as opened:
        end = opened.seek(0, os.SEEK_END)
        os.posix_fallocate(opened.fileno(), end, numbers + _OVERHEAD_BYTES * (1 + len(episodes)))


def _empty_file() -> bytes:
    """Make an HDF5 file without episodes."""
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
        code = getattr(error, "errno", None)  # HDF5's own message has several lines
        why = os.strerror(code) if code else str(error).partition("\n")[0]
        raise DatasetError(
            f"cannot write the data set {place}, of which nothing is kept: {why}"
        ) from error


def _to_disk(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def spec_of(config: EnvRunnerConfig, factory: Callable[..., Any] | None) -> EnvSpec | None:
    """Return the Gymnasium spec that recreates an environment.

    Its id is the value of `env`. None: the environment has no name, or its spec is not JSON.
    """
    if config.gateway or config.is_elsewhere or config.env_wrappers:
        return None
    found = find_environment(config.env) if factory is None else _found_as(config.env, factory)
    if found is None or (isinstance(found, type) and not issubclass(found, gymnasium.Env)):
        return None  # such as a whole vector
    if isinstance(found, EnvSpec):
        spec = copy.deepcopy(found)
    else:
        spec = EnvSpec(config.env, entry_point=config.env)
    # The spec makes what was recorded, not what was registered.
    spec.kwargs.update(config.env_kwargs)
    if config.max_episode_steps is not None:
        spec.max_episode_steps = config.max_episode_steps
    try:
        spec = replace(spec, id=config.env)
    except gymnasium.error.Error:
        pass  # Gymnasium rejects a dotted module before a namespace: the spec keeps its id
    try:
        spec.to_json()
    except (TypeError, ValueError):
        return None
    return spec


def _found_as(name: str, factory: Callable[..., Any]) -> EnvironmentFactory | None:
    """Return the factory, if another process can import it by name.

    A script's code, or a function within a function, cannot be imported.
    """
    if name.startswith(SCRIPT):
        return None
    try:
        return factory if find_environment(name) is factory else None
    except (ValueError, EnvironmentFailed):
        return None


def name_for_minari(env: str) -> str:
    """Reduce an environment's name to the characters that Minari allows."""
    name = re.sub(r"-v\d+$", "", env.rpartition(":")[2])
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "env"


#: A part of a data set is complete when it has this many bytes or is this old. A killed process
#: loses the part that is not complete.
_PART_BYTES: Final = 64 * 1024 * 1024
_PART_SECONDS: Final = 60.0
#: Episodes are written in groups: one by one takes twice as long.
_TOGETHER: Final = 64
_TOGETHER_BYTES: Final = 8 * 1024 * 1024


class SampledEpisodes:
    """Writes one EnvRunner's part of a run's data set.

    The part is a series of data sets, each of which is complete or absent.

    A failed write ends the recording, but not the run.

    Args:
        env_spec: of the environments, if Gymnasium can make them again.

    Raises:
        DatasetError: as `must_be_recordable`.
    """

    def __init__(
        self,
        config: EnvRunnerConfig,
        worker: str,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        env_spec: EnvSpec | None,
        report: Callable[[str], None],
    ) -> None:
        must_be_recordable(observation_space, action_space)
        self._directory, self._worker = Path(config.record).expanduser().absolute(), worker
        self._about = observation_space, action_space, env_spec
        self._report = report
        self._part = ExitStack()
        self._writer: DatasetWriter | None = None
        self._began: float | None = None  # of the part's first episode, written or not
        self._part_bytes = 0  # of the files of the current part
        self._waiting: list[RecordedEpisode] = []
        self._waiting_bytes = 0
        self._ended = False

    def add(self, episode: RecordedEpisode) -> None:
        """Add an episode, which is on disk once its part completes."""
        size = episode.nbytes
        if self._ended:
            return
        self._waiting.append(episode)
        self._waiting_bytes += size
        if self._began is None:
            self._began = time.monotonic()
        if len(self._waiting) >= _TOGETHER or self._waiting_bytes >= _TOGETHER_BYTES:
            self._write()
        if self._part_bytes >= _PART_BYTES:
            self.complete()

    def complete_if_old(self) -> None:
        """Complete an old part, even if no further episode comes."""
        if self._began is not None and time.monotonic() - self._began >= _PART_SECONDS:
            self.complete()

    def complete(self) -> None:
        """Complete the current part. The next episode begins another."""
        self._write()
        self._attempt(self._part.close)
        self._writer, self._part_bytes, self._began = None, 0, None

    def _write(self) -> None:
        """Write the waiting episodes."""
        episodes, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not episodes or self._ended:
            return

        def write() -> None:
            if self._writer is None:
                name = f"{self._worker}-part-{self._next_number()}-v0"
                about = {
                    "algorithm_name": "juggler",
                    "description": "what a run sampled in training",
                }
                part = writing(self._directory / name, name, *self._about, about)
                self._writer = self._part.enter_context(part)
            self._writer.add(*episodes)
            self._part_bytes = self._writer.nbytes

        self._attempt(write)

    def _next_number(self) -> int:
        """Return the number after the last part's."""
        pattern = re.compile(rf"{re.escape(self._worker)}-part-(\d+)-v0")
        found = (pattern.fullmatch(place.name) for place in self._directory.glob("*-part-*"))
        return max((int(each[1]) for each in found if each), default=0) + 1

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except DatasetError as error:
            self._part.__exit__(type(error), error, error.__traceback__)
            self.end(str(error))

    def end(self, why: str) -> None:
        """Stop recording, and report the reason. Any thread may call it."""
        if not self._ended:
            self._ended = True
            self._report(f"records no more episodes, and samples on: {why}")


class RecordedWhilePlayed(EpisodeRecorder):
    """A vector of environments that writes whole episodes while they are played."""

    def __init__(self, env: VectorEnv[Any, Any, Any], episodes: SampledEpisodes) -> None:
        super().__init__(env, episodes.add)
        self._episodes = episodes

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = super().step(actions)
        self._episodes.complete_if_old()
        return result

    def close(self, **kwargs: Any) -> Any:
        """Complete what was recorded, and close the environments."""
        self._episodes.complete()
        return self.env.close(**kwargs)
