"""Writes the episodes of simulators beside a gateway's turns."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from juggler.envrunner.datasets.sampled_episodes import SampledEpisodes
from juggler.runtime.datasets.dataset import RecordedEpisode

#: Of episodes that wait. A disk that is slower for so long holds up the gateway.
_MOST_BYTES: Final = 256 << 20
_LOOK_SECONDS: Final = 1.0


class EpisodeWriter:
    """Writes episodes in a thread of its own, so that no simulator waits for a file.

    Args:
        episodes: take them, in that thread alone.
    """

    def __init__(self, episodes: SampledEpisodes) -> None:
        self._episodes = episodes
        self._changed = threading.Condition()
        self._waiting: deque[RecordedEpisode] = deque()
        self._bytes = 0  # of what waits, and of what is being written
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="recording", daemon=True)
        self._thread.start()

    def add(self, episode: RecordedEpisode) -> None:
        """Take an episode. An error of the thread is raised by a later call, or by `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < _MOST_BYTES or self._error)
            if self._error is not None:
                raise self._error
            self._waiting.append(episode)
            self._bytes += episode.nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Write what waits, and complete the data set."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while self._write_next():
                self._episodes.look_at_the_clock()
            self._episodes.complete()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _write_next(self) -> bool:
        """Write what waits, or wait a moment for more -> whether more may come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing, _LOOK_SECONDS)
            if not self._waiting:
                return not self._closing
            episode = self._waiting.popleft()
        self._episodes.add(episode)
        with self._changed:
            self._bytes -= episode.nbytes
            self._changed.notify_all()
        return True
