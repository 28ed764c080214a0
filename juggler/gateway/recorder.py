"""From recordings to rows of batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from juggler.gateway.environments import STALL_SECONDS, Environments
from juggler.gateway.recordings import Recording, steps_of
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import put, take
from juggler.runtime.wire.trees import Tree


@dataclass(slots=True)
class _Episode:
    """The episode of an environment, as far as it was used."""

    id: int
    length: int = 0
    total: float = 0.0  # of rewards


class Recorder:
    """Makes rows of recordings when samples are asked for: they wait until then.

    Args:
        environments: of the recordings, with the rows to fill.
        policy: keeps the state of each environment.
        row_age: maximum number of updates by which a recording's weights may be behind the newest.
        see: turns observations of simulators [B, ...] into those of batches; the second argument
            returns which are new [B].

    Attributes:
        waiting: recordings that were not used yet, the oldest first.
        newest: version of the weights.
        bytes_waiting: of their messages.
        row_age: as given.
    """

    def __init__(
        self,
        environments: Environments,
        policy: Actor,
        row_age: int,
        see: Callable[[Tree, Callable[[], NDArray[np.bool_]]], Tree],
    ) -> None:
        self.waiting: deque[Recording] = deque()
        self.newest = Version(0, 0)
        self.bytes_waiting = 0
        self._environments, self._policy = environments, policy
        self.row_age = row_age
        self._see = see
        self._episodes: dict[int, _Episode] = {}  # running ones, by place
        self._filling: dict[int, float] = {}  # places with a row, and when steps last came for it
        self._stale = 0

    @property
    def steps_waiting(self) -> int:
        return sum(recording.left for recording in self.waiting)

    def arrive(self, recording: Recording) -> None:
        def new() -> NDArray[np.bool_]:
            live = np.ones(len(recording.rewards) + 1, np.bool_)  # [L + 1]
            live[0] = recording.starts  # else the recording before ended with it
            return live

        recording.observations = self._see(recording.observations, new)  # [L + 1, ...]
        self.waiting.append(recording)
        self.bytes_waiting += recording.bytes
        self._environments.counts["steps_recorded"] += len(recording.rewards)

    def take_stale(self) -> int:
        """Steps that were dropped since the last call."""
        stale, self._stale = self._stale, 0
        return stale

    def go_on(self, wanted: int) -> list[Recording]:
        """Make rows of waiting recordings -> those that are used up.

        Args:
            wanted: rows that may begin.
        """
        done: list[Recording] = []
        later: deque[Recording] = deque()
        full: set[int] = set()  # places with a recording that waits
        while self.waiting:
            recording = self.waiting.popleft()
            if recording.place not in full:
                wanted -= self._use(recording, wanted)
            if recording.left:
                later.append(recording)
                full.add(recording.place)
            else:
                done.append(recording)
                self.bytes_waiting -= recording.bytes
        self.waiting = later
        return done

    def use(self, version: Version) -> None:
        """There are newer weights."""
        self.newest = version
        begun, rows = self._environments.rows.first_updates, self._environments.of["row"]
        for place in list(self._filling):
            if version.update - int(begun[rows[place]]) > self.row_age:
                self._hand_in(place)

    def hand_in_stalled(self) -> None:
        """Hand in rows for which no steps have come for long. To be called now and then."""
        since = time.monotonic() - STALL_SECONDS
        for place in [place for place, at in self._filling.items() if at < since]:
            self._hand_in(place)

    def unseat(self, places: set[int]) -> None:
        """Forget environments that leave. To be called before they are gone."""
        lost = [each for each in self.waiting if each.place in places]
        self.waiting = deque(each for each in self.waiting if each.place not in places)
        self._environments.counts["steps_lost"] += sum(each.left for each in lost)
        self.bytes_waiting -= sum(each.bytes for each in lost)
        for place in places:
            self._filling.pop(place, None)
            if self._episodes.pop(place, None) is not None:
                self._environments.counts["episodes_cut"] += 1

    # -- one recording --------------------------------------------------------------------------

    def _use(self, recording: Recording, wanted: int) -> int:
        """Use a recording as far as rows are wanted -> rows that began with it."""
        begun = 0
        place, rows = recording.place, self._environments.rows
        if recording.starts and not recording.taken:
            self._end_without_word(place)
        while recording.left:
            count = recording.left
            if self._is_stale(recording):
                self._drop(recording)
                continue
            if place not in self._filling:
                if begun >= wanted:
                    break
                begun += 1
                count = min(count, rows.steps)
            else:
                count = min(count, rows.steps - int(self._environments.of["step"][place]))
            self._write(recording, count)
        return begun

    def _is_stale(self, recording: Recording) -> bool:
        version = recording.version
        return version is not None and self.newest.update - version.update > self.row_age

    def _end_without_word(self, place: int) -> None:
        """End the episode that is running there, as another one begins."""
        if self._episodes.pop(place, None) is not None:
            self._environments.counts["episodes_cut"] += 1
            self._environments.cut(place)
            self._filling.pop(place, None)

    def _episode(self, place: int) -> _Episode:
        """The episode that is running there, or a new one."""
        if place not in self._episodes:
            self._episodes[place] = _Episode(int(self._environments.new_episodes(1)[0]))
        return self._episodes[place]

    def _drop(self, recording: Recording) -> None:
        """Drop the rest of a recording, which also ends its row: a row has no gaps."""
        count = recording.left
        self._stale += count
        self._environments.counts["steps_stale"] += count
        recording.stale = True
        self._hand_in(recording.place)
        self._follow(recording, count)
        self._count(recording, count)

    def _write(self, recording: Recording, count: int) -> None:
        """Write the next steps of a recording into the row of its environment."""
        place, begin = recording.place, recording.taken
        of, rows = self._environments.of, self._environments.rows
        episode, version = self._episode(place), recording.version or self.newest
        states = self._follow(recording, count)
        if place not in self._filling:
            of["row"][place], of["step"][place] = rows.begin(states, 1, recorded=True)[0], 0
        row, step = int(of["row"][place]), int(of["step"][place])
        end = begin + count
        rows.record(
            row,
            step,
            count,
            observations=steps_of(recording.observations, begin, end),
            actions=steps_of(recording.actions, begin, end),
            rewards=recording.rewards[begin:end],
            action_logp=recording.action_logp[begin:end],
        )
        if not (step and episode.length):
            beginning = np.array([[episode.id, episode.length, *version]], np.uint64)
            rows.begin_episodes(np.array([row * rows.width + step]), beginning)
        after = take(recording.observations, end)  # [...]
        if end == len(recording.rewards):
            rows.columns["terminated"][row, step + count - 1] = recording.terminated
            if recording.truncated:
                rows.columns["truncated"][row, step + count - 1] = True
                rows.ended_with(row, step + count - 1, after)
        of["step"][place], of["first"][place] = step + count, False
        self._filling[place] = time.monotonic()
        self._count(recording, count)
        put(rows.columns["observations"], (row, step + count), after)
        if step + count == rows.steps:
            rows.finish(np.array([row]), np.array([rows.steps]))
            of["row"][place] = -1
            del self._filling[place]

    def _follow(self, recording: Recording, count: int) -> dict[str, Tree]:
        """Let the policy follow the next steps -> its states before them."""
        begin, end = recording.taken, recording.taken + count
        return self._policy.follow(
            recording.place,
            steps_of(recording.observations, begin, end),
            steps_of(recording.actions, begin, end),
            recording.rewards[begin:end],
            first=recording.starts and not begin,
        )

    def _count(self, recording: Recording, count: int) -> None:
        """Count the next steps as used."""
        place, begin = recording.place, recording.taken
        episode = self._episode(place)
        episode.length += count
        rewards = recording.rewards[begin : begin + count]
        episode.total += float(rewards.sum(dtype=np.float64))
        recording.taken += count
        if recording.left or not (recording.terminated or recording.truncated):
            return
        del self._episodes[place]
        self._environments.of["first"][place] = True
        self._environments.counts["episodes"] += 1
        # Without a version another policy acted, and its return says nothing of ours.
        if recording.version is not None:
            self._environments.ended_with(episode.total, episode.length)

    def _hand_in(self, place: int) -> None:
        """Complete its row, however short."""
        if self._filling.pop(place, None) is not None:
            self._environments.pause(np.array([place]))
