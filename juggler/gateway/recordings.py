"""Steps that a gateway did not choose, and their rows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.gateway.environments import STALL_SECONDS, Environments
from juggler.gateway.row_layout import Layout, ValueChecks, check_rewards, read_infos
from juggler.gateway.sessions import Code, Session, SessionError
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.leaves import acted_dtype, at, holds_masks
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import put, space_leaves, take, tree_map
from juggler.runtime.wire.trees import Path, Tree, flatten, path_name, unflatten
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_ROUNDED = 1e-3  # rounding of a log-probability of 0 in other programs


@dataclass(slots=True, eq=False)
class Recording:
    """L steps of one environment, within one episode.

    Attributes:
        session: of the simulator.
        seq: of the message.
        environment: its number in the session.
        observations: a tree [L + 1, ...], as batches hold them.
        actions: a tree [L, ...], as batches hold them.
        rewards: [L]
        action_logp: [L]
        starts: the first step begins an episode.
        terminated: the last step ended it.
        truncated: the last step cut it off.
        version: of the weights that acted; None: not known.
        infos: [L, K] numbers that its simulator tells of each step; None: it tells none.
        taken: how many of the steps were used.
        stale: some of them were too old to be learned from.
        bytes: of its message.
        arrived: seconds of `time.perf_counter`.
    """

    session: Session
    seq: int
    environment: int
    observations: Tree
    actions: Tree
    rewards: NDArray[np.float32]
    action_logp: NDArray[np.float32]
    starts: bool
    terminated: bool
    truncated: bool
    version: Version | None
    infos: NDArray[np.float64] | None = None
    taken: int = 0
    stale: bool = False
    bytes: int = 0
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def place(self) -> int:
        """The place of its environment in the gateway."""
        return int(self.session.alone.places[self.environment])

    @property
    def left(self) -> int:
        """Steps that were not used yet."""
        return len(self.rewards) - self.taken


class Reader:
    """Reads recordings, and checks them.

    Args:
        observation_space: the simulators'.
        action_space: of the actions that policies choose.
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        self._observations, self._actions = Layout(observation_space), Layout(action_space)
        self._checks = ValueChecks(observation_space, action_space)
        self._leaves = space_leaves(action_space)
        self._masked = holds_masks(observation_space)
        self._counts = not any(isinstance(space, spaces.Box) for _, space in self._leaves)

    def read(self, session: Session, message: pb.Recording) -> Recording:
        """
        Raises:
            SessionError: its session may not send that.
        """
        try:
            self._check_place(session, message)
            return self._read(session, message)
        except SessionError as error:
            error.seq = message.seq
            raise

    def _check_place(self, session: Session, message: pb.Recording) -> None:
        if message.agent:
            text = f"a recording of agent {message.agent}: this session has agent 0 alone"
            raise SessionError(Code.UNKNOWN_AGENT, text)
        known, environment = session.environments, message.environment
        if environment >= known:
            text = f"environment {environment}: the hello announced 0 to {known - 1}"
            raise SessionError(Code.UNKNOWN_ENVIRONMENT, text)
        if not message.starts and not session.alone.acted[environment]:
            text = (
                f"environment {environment} is in no episode: the first recording of one says "
                "starts, and the last one terminated or truncated"
            )
            raise SessionError(Code.OUT_OF_ORDER, text)

    def _read(self, session: Session, message: pb.Recording) -> Recording:
        steps = len(message.rewards)
        if not steps:
            text = "a recording without rewards: send one for each of its steps, at least 1"
            raise SessionError(Code.WRONG_SHAPE, text)
        check_rewards(message.rewards, lambda step: f"step {step}")
        rewards = np.array(message.rewards, np.float32)  # [L]
        raw = self._observations.raw(message.observations, steps + 1, "observations")
        observations = self._observations.tree([raw], steps + 1)  # [L + 1, ...]
        self._check_observations(observations, message.terminated or message.truncated)
        raw = self._actions.raw(message.actions, steps, "actions")
        actions = self._actions.tree([raw], steps)  # [L, ...]
        self._check_actions(observations, actions)
        return Recording(
            session,
            message.seq,
            message.environment,
            observations,
            self._as_chosen(actions),
            rewards,
            self._log_probabilities(message.action_logp, steps),
            message.starts,
            message.terminated,
            message.truncated and not message.terminated,
            _version(session, message),
            read_infos(session, message.infos, steps, "steps"),
        )

    def _check_observations(self, observations: Tree, ended: bool) -> None:
        """The last observation of an episode need not allow any action."""
        if ended:
            last = tree_map(lambda array: array[-1:], observations)  # [1, ...]
            observations = tree_map(lambda array: array[:-1], observations)  # [L, ...]
            if found := self._checks.first_bad(last, masks=False):
                raise found[1]
        if found := self._checks.first_bad(observations):
            raise SessionError(found[1].code, f"step {found[0]}: {found[1]}")

    def _log_probabilities(self, given: Any, steps: int) -> NDArray[np.float32]:
        if len(given) != steps:
            raise SessionError(
                Code.NO_LOG_PROBABILITIES,
                f"{len(given)} action_logp for {steps} steps: how far the policy has moved from "
                "that which acted is known from its log-probabilities alone. Send the one of each "
                "action; where they were not kept, nothing can be learned from the data here",
            )
        action_logp = np.array(given, np.float32)  # [L]
        _must_be_finite(action_logp, "action_logp")
        if self._counts and action_logp.max() > _ROUNDED:
            step = int(action_logp.argmax())
            raise SessionError(
                Code.NO_LOG_PROBABILITIES,
                f"action_logp [{step}] is {action_logp[step]}: no choice among several has a "
                "log-probability above 0. Send logarithms of probabilities",
            )
        return action_logp

    def _check_actions(self, observations: Tree, actions: Tree) -> None:
        """Check that the space and the masks allow the actions."""
        for path, space in self._leaves:
            array, where = at(actions, path), f" at {path_name(path)}" if path else ""
            if array.dtype.kind == "f":
                _must_be_finite(array, f"actions{where}")
            if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
                counts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
                places = (array - space.start).reshape(len(array), -1)  # [L, choices]
                bad = ((places < 0) | (places >= counts)).any(1)  # [L]
                if not bad.any() and self._masked:
                    bad = self._illegal(observations, path, counts, places)
                if bad.any():
                    step = int(bad.argmax())
                    text = f"the action{where} of step {step} is {array[step]}"
                    raise SessionError(
                        Code.WRONG_SHAPE, f"{text}, which its space or its mask does not have"
                    )
            elif isinstance(space, spaces.MultiBinary) and (array & ~1).any():
                text = f"the actions{where} have other numbers than 0 and 1"
                raise SessionError(Code.WRONG_SHAPE, text)

    def _illegal(
        self, observations: Tree, path: Path, counts: NDArray[Any], places: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """[L] where a choice [L, choices] of `counts` was not allowed."""
        masks = dict(flatten(at(observations, (ACTION_MASK,))))
        if path not in masks:
            return np.zeros(len(places), np.bool_)
        starts = np.cumsum([0, *counts[:-1]])  # [choices]
        flat = masks[path][: len(places)].reshape(len(places), -1)  # [L, sum of counts]
        allowed = np.take_along_axis(flat, starts + places, 1)  # [L, choices]
        illegal: NDArray[np.bool_] = (allowed == 0).any(1)  # [L]
        return illegal

    def _as_chosen(self, actions: Tree) -> Tree:
        """Actions in the dtypes that policies act in."""
        return unflatten(
            [
                (path, at(actions, path).astype(acted_dtype(space), copy=False))
                for path, space in self._leaves
            ]
        )


def steps_of(tree: Tree, begin: int, end: int) -> Tree:
    """Some of a tree [L, ...]; a view."""
    some: Tree = take(tree, slice(begin, end))
    return some


def _version(session: Session, message: pb.Recording) -> Version | None:
    if session.mode == pb.LOGGED_DATA:
        return None
    if not message.HasField("version"):
        text = "a recording without a version: send that of the policy that acted"
        raise SessionError(Code.UNKNOWN_VERSION, text)
    return Version(message.version.generation, message.version.update)


def _must_be_finite(array: NDArray[Any], what: str) -> None:
    if not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0].tolist()
        text = f"{what} {place} is {array[tuple(place)]}: send finite numbers"
        raise SessionError(Code.NOT_FINITE, text)


@dataclass(slots=True)
class _Episode:
    """The episode of an environment, as far as it was used."""

    id: int
    length: int = 0
    total: float = 0.0  # of rewards


class Recorder:
    """Makes rows of recordings when samples are asked for.

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
        """Make rows of waiting recordings -> the recordings that are used up.

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
        """Hand in rows that have waited for long. Called now and then."""
        since = time.monotonic() - STALL_SECONDS
        for place in [place for place, began in self._filling.items() if began < since]:
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
        """Use a recording as far as rows are wanted -> new rows."""
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
        """Drop the rest of a recording, and end its row."""
        count = recording.left
        self._stale += count
        self._environments.counts["steps_stale"] += count
        recording.stale = True
        self._hand_in(recording.place)
        self._follow(recording, count)
        self._count(recording, count)

    def _write(self, recording: Recording, count: int) -> None:
        """Write the next steps of a recording into its row."""
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
