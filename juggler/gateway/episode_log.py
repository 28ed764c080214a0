"""Gathers whole episodes of simulators, and writes them in a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.datasets.dataset_writer import EpisodesUnderWay, SampledEpisodes, row_of
from juggler.gateway.step_batches import PlayerRows
from juggler.runtime.acting.actor import Actor
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.wire.structures import to_tree
from juggler.runtime.wire.trees import Tree


class EpisodeLog:
    """Gathers the episodes of environments, by place.

    Args:
        policy: turns chosen actions into the environments' actions.
        take: called with each episode when it ends.
    """

    def __init__(
        self, policy: Actor, action_space: Any, take: Callable[[RecordedEpisode], None]
    ) -> None:
        self._policy, self._action_space = policy, action_space
        self._under_way = EpisodesUnderWay(take)
        self._shown: dict[int, Tree] = {}  # by place, the observation to act on
        self._acted: dict[int, tuple[Tree, Tree]] = {}  # by place, a step that waits for its reward

    def arrive(self, shares: Sequence[PlayerRows], shown: Tree) -> None:
        """Add the results of actions, and the next observations.

        Args:
            shares: shares of different environments.
            shown: [B, ...] observations of all their rows, in order.
        """
        row = 0
        for share in shares:
            finals = share.finals if share.truncated else {}  # [K, ...]
            paused, terminated = set(share.paused), set(share.terminated)
            final_of = {at: k for k, at in enumerate(share.truncated)}
            rewards = share.rewards
            # The result of the last action precedes the next observation of its place.
            for at, place in enumerate(share.slots.tolist()):
                if place in self._acted:
                    self._under_way.step(place, *self._acted.pop(place), rewards[at])
                if at in terminated:  # its last observation was not checked
                    self._under_way.end(place, None, terminated=True)
                elif at in final_of:
                    last = row_of(finals, final_of[at])
                    self._under_way.end(place, last, terminated=False)
                if at not in paused:
                    self._shown[place] = row_of(shown, row + at)
            row += len(share.slots)

    def act(self, places: NDArray[Any], actions: Tree) -> None:
        """Add the actions [B, ...] of environments at places [B]."""
        for row, place in enumerate(places.tolist()):
            self._acted[place] = self._shown.pop(place), row_of(actions, row)

    def record(
        self,
        place: int,
        observations: Tree,
        actions: Tree,
        rewards: NDArray[np.float32],
        *,
        starts: bool,
        terminated: bool | None,
    ) -> None:
        """Add L steps in which a simulator acted by itself.

        Args:
            observations: [L + 1, ...] before each step, and after the last one.
            actions: [L, ...] chosen actions.
            rewards: [L]
            starts: the first step begins an episode.
            terminated: true if the last step terminated the episode, false if it truncated it;
                None: the episode continues.
        """
        sent = to_tree(self._action_space, self._policy.for_environments(actions))  # [L, ...]
        if starts:
            self._under_way.drop(place)
        for t, reward in enumerate(rewards.tolist()):
            self._under_way.step(place, row_of(observations, t), row_of(sent, t), reward)
        if terminated is not None:
            last = row_of(observations, len(rewards))
            self._under_way.end(place, last, terminated=terminated)

    def drop(self, places: Iterable[int]) -> None:
        """Drop the episodes of removed environments."""
        for place in places:
            self._under_way.drop(place)
            self._shown.pop(place, None)
            self._acted.pop(place, None)


#: Maximum size of queued episodes. Beyond it, the gateway waits for the disk.
_MOST_BYTES: Final = 256 << 20
_LOOK_SECONDS: Final = 1.0
#: How long to wait for the disk. The end of a run gives recordings 30 s.
_DISK_SECONDS: Final = 25.0


class EpisodeWriter:
    """Writes episodes in its own thread, so simulators need not wait.

    Args:
        episodes: the data set to write. Only the thread uses it, except for `end`.
    """

    def __init__(self, episodes: SampledEpisodes) -> None:
        self._episodes = episodes
        self._changed = threading.Condition()
        self._waiting: deque[RecordedEpisode] = deque()
        self._bytes = 0  # of episodes that are queued or being written
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="recording", daemon=True)
        self._thread.start()

    def add(self, episode: RecordedEpisode) -> None:
        """Queue an episode.

        A later call or `close` raises errors of the thread. If the disk hangs, the recording ends
        and the gateway continues.
        """
        with self._changed:
            if self._closing:
                return
            free = self._changed.wait_for(
                lambda: self._bytes < _MOST_BYTES or self._error, _DISK_SECONDS
            )
            # Raised in the gateway's thread, so that it ends the gateway.
            if self._error is not None:
                raise self._error
            if not free:
                self._closing = True
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
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closing, _LOOK_SECONDS)
                    episode = self._waiting.popleft() if self._waiting else None
                    if episode is None and self._closing:
                        break
                # Without the lock, because the disk may be slow.
                if episode is not None:
                    self._episodes.add(episode)
                    with self._changed:
                        self._bytes -= episode.nbytes
                        self._changed.notify_all()
                self._episodes.complete_if_old()
            self._episodes.complete()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
