"""Records a run's sampled episodes while it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.datasets.dataset_writer import (
    DatasetWriter,
    EpisodeRecorder,
    bytes_of,
    must_be_recordable,
    spec_of,
    writing,
)
from juggler.runtime.datasets.dataset import DatasetError, RecordedEpisode

#: A part of a data set is complete when it has this many bytes or is this old. A killed process
#: loses the part that is not complete.
_PART_BYTES: Final = 64 * 1024 * 1024
_PART_SECONDS: Final = 60.0
#: Episodes are written in groups: one by one takes twice as long.
_TOGETHER: Final = 64
_TOGETHER_BYTES: Final = 8 * 1024 * 1024
_GB: Final = 1e9


class SampledEpisodes:
    """Writes one EnvRunner's part of a run's data set.

    The part is a series of data sets, each of which is complete or absent.

    A failed write ends the recording, but not the run.

    Args:
        config: has the directory and the limit of the recording.
        worker: the EnvRunner's name.
        observation_space: of the environments.
        action_space: of the environments.
        env_spec: of the environments, if Gymnasium can make them again.
        report: logs why the recording has ended.
        part_seconds: the age at which a part is complete, from its first episode on.

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
        part_seconds: float = _PART_SECONDS,
    ) -> None:
        must_be_recordable(observation_space, action_space)
        self._directory, self._worker = Path(config.record).expanduser().absolute(), worker
        self._about = observation_space, action_space, env_spec
        self._most_bytes = None if config.record_gb is None else config.record_gb * _GB
        self._report, self._part_seconds = report, part_seconds
        self._bytes = bytes_of(self._directory.glob(f"{worker}-part-*-v0/data/*"))  # of all parts
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
        held = self._bytes + self._part_bytes + self._waiting_bytes
        if self._most_bytes is not None and held + size > self._most_bytes:
            self.complete()
            self.end(f"there are record_gb = {self._most_bytes / _GB:g} of them")
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
        if self._began is not None and time.monotonic() - self._began >= self._part_seconds:
            self.complete()

    def complete(self) -> None:
        """Complete the current part. The next episode begins another."""
        self._write()
        self._attempt(self._part.close)
        self._bytes += self._part_bytes
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
    """A vector of environments that writes whole episodes while they are played.

    Args:
        env: N environments, with any autoreset mode.
        episodes: receives the episodes.
    """

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


def recorded_while_played(
    env: VectorEnv[Any, Any, Any],
    config: EnvRunnerConfig,
    worker: str,
    factory: Callable[..., Any] | None,
    report: Callable[[str], None],
) -> VectorEnv[Any, Any, Any]:
    """Let environments record their episodes, if the configuration has `record`.

    Args:
        env: N environments.
        config: has the directory.
        worker: the EnvRunner's name.
        factory: made the environments; None: the name in `config` did.
        report: as in `SampledEpisodes`.

    Raises:
        DatasetError: as `SampledEpisodes`.
    """
    if not config.record:
        return env
    spaces = env.single_observation_space, env.single_action_space
    spec = spec_of(config, factory)
    return RecordedWhilePlayed(env, SampledEpisodes(config, worker, *spaces, spec, report))
