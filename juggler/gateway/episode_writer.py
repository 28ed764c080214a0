"""Write the episodes of simulators to disk in a separate thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from juggler.envrunner.datasets.sampled_episodes import SampledEpisodes
from juggler.runtime.datasets.dataset import RecordedEpisode

#: Maximum size of episodes that wait. When it is reached, the gateway waits for the disk.
_MOST_BYTES: Final = 256 << 20
_LOOK_SECONDS: Final = 1.0
#: How long to wait for the disk. The end of a run gives recordings 30 s.
_DISK_SECONDS: Final = 25.0


class EpisodeWriter:
    """Writes episodes in its own thread, so simulators need not wait.

    Args:
        episodes: the data set to write. Only that thread uses it, except for `end`.
    """

    def __init__(self, episodes: SampledEpisodes) -> None:
        self._episodes = episodes
        self._changed = threading.Condition()
        self._waiting: deque[RecordedEpisode] = deque()
        self._bytes = 0  # of episodes that wait or are being written
        self._closing = False
        self._hung = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="recording", daemon=True)
        self._thread.start()

    def add(self, episode: RecordedEpisode) -> None:
        """Queue an episode. A later call or `close` raises errors of the thread.

        A disk that hangs ends the recording, and the gateway continues.
        """
        with self._changed:
            if self._hung:
                return
            free = self._changed.wait_for(
                lambda: self._bytes < _MOST_BYTES or self._error, _DISK_SECONDS
            )
            if self._error is not None:
                raise self._error
            if not free:
                self._hung = True
                self._waiting.clear()
                self._episodes.end(f"the disk has written nothing for {_DISK_SECONDS:g} s")
                return
            self._waiting.append(episode)
            self._bytes += episode.nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Write the remaining episodes, and complete the data set.

        Raises:
            TimeoutError: the disk is too slow. The newest part of the data set is lost.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_DISK_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(
                f"recorded episodes are lost: the disk took more than {_DISK_SECONDS:g} s for them"
            )
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
        """Write the next episode, or wait -> whether more may come."""
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
