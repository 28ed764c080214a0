"""From recordings of what others did to rows of batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from juggler.gateway.environments import STALL_SECONDS, Environments
from juggler.gateway.gathered_policy import GatheredPolicy
from juggler.gateway.places import put, take
from juggler.gateway.recordings import Recording, steps_of
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree


@dataclass(slots=True)
class _Episode:
    """Where an environment's episode is: what of it was looked at so far."""

    id: int
    length: int = 0
    total: float = 0.0  # of rewards


class Recorder:
    """Takes recordings when somebody asks for samples, and not before: they wait until then.

    Args:
        environments: that the recordings are of; with the rows that are filled.
        policy: learns from them, and remembers what came before in each environment.
        max_staleness: updates that weights may be behind the newest when their steps become a row.
        see: what simulators show [B, ...], and what gives which of that is new [B] -> what batches
            hold of it.

    Attributes:
        waiting: that nothing has become of yet, the oldest first.
        newest: weights that there are.
        bytes_waiting: that their messages had.
        max_staleness: as given.
    """

    def __init__(
        self,
        environments: Environments,
        policy: GatheredPolicy,
        max_staleness: int,
        see: Callable[[Tree, Callable[[], NDArray[np.bool_]]], Tree],
    ) -> None:
        self.waiting: deque[Recording] = deque()
        self.newest = Version(0, 0)
        self.bytes_waiting = 0
        self._environments, self._policy = environments, policy
        self.max_staleness = max_staleness
        self._see = see
        self._episodes: dict[int, _Episode] = {}  # that are running, by place
        self._filling: dict[int, float] = {}  # places with a row, and when something came for it
        self._stale = 0

    @property
    def steps_waiting(self) -> int:
        return sum(recording.left for recording in self.waiting)

    def arrive(self, recording: Recording) -> None:
        def new() -> NDArray[np.bool_]:
            live = np.ones(len(recording.rewards) + 1, np.bool_)  # [L + 1]
            live[0] = recording.starts  # else it is the last one of the recording before
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
        """Make rows of what waits -> recordings of which nothing is left.

        Args:
            wanted: rows that may be begun.
        """
        done: list[Recording] = []
        later: deque[Recording] = deque()
        full: set[int] = set()  # places where something waits
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
        begun, rows = self._environments.rows.columns["updates"], self._environments.of["row"]
        for place in list(self._filling):
            if version.update - int(begun[rows[place], 0]) > self.max_staleness:
                self._hand_in(place)

    def hand_in_stalled(self) -> None:
        """Rows to which nothing has come for long; to be called now and then."""
        since = time.monotonic() - STALL_SECONDS
        for place in [place for place, at in self._filling.items() if at < since]:
            self._hand_in(place)

    def unseat(self, places: set[int]) -> None:
        """These environments go: call it before they are gone."""
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
        """Make what is wanted of a recording -> rows that were begun for it."""
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
        return version is not None and self.newest.update - version.update > self.max_staleness

    def _end_without_word(self, place: int) -> None:
        """An episode that is running there is over, as another one begins."""
        if self._episodes.pop(place, None) is not None:
            self._environments.counts["episodes_cut"] += 1
            self._environments.cut(place)
            self._filling.pop(place, None)

    def _episode(self, place: int) -> _Episode:
        """The one that is running there, or one that begins."""
        if place not in self._episodes:
            self._episodes[place] = _Episode(self._environments.new_episode())
        return self._episodes[place]

    def _drop(self, recording: Recording) -> None:
        """All that is left of it. A row cannot go on behind the hole."""
        count = recording.left
        self._stale += count
        self._environments.counts["steps_stale"] += count
        recording.stale = True
        self._hand_in(recording.place)
        self._follow(recording, count)
        self._count(recording, count)

    def _write(self, recording: Recording, count: int) -> None:
        """Its next steps, into the row of their environment."""
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
            episodes=episode.id,
            offsets=episode.length + np.arange(count),
            generations=version.generation,
            updates=version.update,
        )
        after = take(recording.observations, end)  # [...]
        if end == len(recording.rewards):
            rows.columns["terminated"][row, step + count - 1] = recording.terminated
            if recording.truncated:
                rows.columns["truncated"][row, step + count - 1] = True
                rows.ended_with(row, step + count - 1, after)
        of["step"][place], of["first"][place] = step + count, False
        self._filling[place] = time.monotonic()
        self._count(recording, count)
        if step + count == rows.steps:
            rows.finish(row, rows.steps, after)
            of["row"][place] = -1
            del self._filling[place]
        else:
            put(rows.columns["observations"], (row, step + count), after)

    def _follow(self, recording: Recording, count: int) -> dict[str, Tree]:
        """What was known before its next steps; remember them."""
        begin, end = recording.taken, recording.taken + count
        return self._policy.follow(
            recording.place,
            steps_of(recording.observations, begin, end),
            steps_of(recording.actions, begin, end),
            recording.rewards[begin:end],
            first=recording.starts and not begin,
        )

    def _count(self, recording: Recording, count: int) -> None:
        """Its next steps have become of something."""
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
        if recording.version is not None:  # others say nothing of how good our policy is
            self._environments.ended.append((episode.total, episode.length))

    def _hand_in(self, place: int) -> None:
        """Its row is as long as it is going to be."""
        if self._filling.pop(place, None) is not None:
            self._environments.pause([place])
