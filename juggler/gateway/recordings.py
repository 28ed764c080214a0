"""Serves simulators that act by themselves: recorded steps and policies."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.gateway.curriculum import Curriculum
from juggler.gateway.module_player import ModulePlayer
from juggler.gateway.session_errors import Code, SessionError
from juggler.gateway.session_manager import SessionManager
from juggler.gateway.sessions import AgentInterface, GatewaySession
from juggler.gateway.step_batches import (
    check_agents,
    check_rewards,
    environments_of,
    read_infos,
    to_message,
)
from juggler.runtime.acting.acting_graph import ActingGraph, to_onnx
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.leaves import acted_dtype, at, holds_masks
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import (
    choices_of,
    find_outside,
    put,
    space_leaves,
    take,
    tree_map,
)
from juggler.runtime.wire.trees import Tree, flatten, path_name, unflatten
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_ROUNDED = 1e-3  # rounding of a log-probability of 0 in other programs
#: Maximum bytes of recordings that wait for requests.
_MOST_WAITING_BYTES = 1 << 30


@dataclass(slots=True, eq=False)
class Recording:
    """L steps of one environment, within one episode."""

    session: GatewaySession
    seq: int
    environment: int  # its number in the session
    observations: Tree  # a tree [L + 1, ...], as in batches
    actions: Tree  # a tree [L, ...], as in batches
    rewards: NDArray[np.float32]  # [L]
    action_logp: NDArray[np.float32]  # [L]
    starts: bool  # the first step begins an episode
    terminated: bool  # the last step ended it
    truncated: bool  # the last step cut it off
    version: Version | None  # version of the weights that acted; None: not known
    infos: NDArray[np.float64] | None = None  # [L, K] numbers of each step; None: no numbers
    taken: int = 0  # number of used steps
    stale: bool = False  # some steps were too old for training
    bytes: int = 0  # size of its message
    arrived: float = field(default_factory=time.perf_counter)  # seconds of `time.perf_counter`

    @property
    def place(self) -> int:
        """Place of its environment in the gateway."""
        return int(self.session.alone.places[self.environment])

    @property
    def ends(self) -> bool:
        """Whether the last step ended its episode, or cut it off."""
        return self.terminated or self.truncated

    @property
    def left(self) -> int:
        """Number of unused steps."""
        return len(self.rewards) - self.taken


class RecordingReader:
    """Reads recordings, and checks them.

    Args:
        interface: the simulators' observations, and the actions that policies choose.
    """

    def __init__(self, interface: AgentInterface) -> None:
        observation_space, action_space = interface.spaces
        self._interface = interface
        self._leaves = space_leaves(action_space)
        self._choices = choices_of(self._leaves)
        self._masked = holds_masks(observation_space)
        self._counts = not any(isinstance(space, spaces.Box) for _, space in self._leaves)

    def read(self, session: GatewaySession, message: pb.Recording) -> Recording:
        """Read and check a recording.

        Raises:
            SessionError: the recording is not valid.
        """
        try:
            check_agents(session, [message], "a recording")
            (environment,) = environments_of(session, [message.environment])
            if not message.starts and not session.alone.acted[environment]:
                text = (
                    f"environment {environment} is in no episode: the first recording of one says "
                    "starts, and the last one terminated or truncated"
                )
                raise SessionError(Code.OUT_OF_ORDER, text)
            return self._read(session, message)
        except SessionError as error:
            error.seq = message.seq
            raise

    def _read(self, session: GatewaySession, message: pb.Recording) -> Recording:
        steps = len(message.rewards)
        if not steps:
            text = "a recording without rewards: send one for each of its steps, at least 1"
            raise SessionError(Code.WRONG_SHAPE, text)
        check_rewards(message.rewards, lambda step: f"step {step}")
        rewards = np.array(message.rewards, np.float32)  # [L]
        raw = self._interface.observations.raw(message.observations, steps + 1, "observations")
        observations = self._interface.observations.tree([raw], steps + 1)  # [L + 1, ...]
        self._check_observations(observations, message.terminated or message.truncated)
        raw = self._interface.actions.raw(message.actions, steps, "actions")
        actions = self._interface.actions.tree([raw], steps)  # [L, ...]
        self._check_actions(observations, actions)
        # Everything has been checked: no row gets a part of a bad recording.
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
            read_infos(message.infos, steps, len(session.hello.info_names), "steps"),
        )

    def _check_observations(self, observations: Tree, ended: bool) -> None:
        """Check observations; the last one of an episode may allow no action."""
        if ended:
            last = tree_map(lambda array: array[-1:], observations)  # [1, ...]
            observations = tree_map(lambda array: array[:-1], observations)  # [L, ...]
            if found := self._interface.first_bad(last, masks=False):
                raise found[1]
        if found := self._interface.first_bad(observations):
            raise SessionError(found[1].code, f"step {found[0]}: {found[1]}")

    def _log_probabilities(self, given: Any, steps: int) -> NDArray[np.float32]:
        if len(given) != steps:
            raise SessionError(
                Code.NO_LOG_PROBABILITIES,
                f"{len(given)} action_logp for {steps} steps: how far the policy has moved from "
                "that which acted is known from its log-probabilities alone. Send the one of each "
                "action; where they were not kept, nothing can be learned from the data here",
            )
        # Other programs round, so a log-probability may be slightly above 0.
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
        for path, array in flatten(actions):
            if array.dtype.kind == "f":
                _must_be_finite(array, f"actions{f' at {path_name(path)}' if path else ''}")
        if found := find_outside(self._choices, actions):
            (step, *_), what = found
            raise SessionError(Code.WRONG_SHAPE, f"the action of step {step}{what}")
        # A forbidden action has the probability 0, which importance ratios divide by.
        masks = dict(flatten(at(observations, (ACTION_MASK,)))) if self._masked else {}
        for path, leaf in self._leaves:
            if path not in masks:
                continue
            space: Any = leaf
            counts = np.ravel(space.n if isinstance(leaf, spaces.Discrete) else space.nvec)
            array = at(actions, path)  # [L, ...]
            places = (array - space.start).reshape(len(array), -1)  # [L, choices]
            flat = masks[path][: len(array)].reshape(len(array), -1)  # [L, sum of counts]
            starts = np.cumsum([0, *counts[:-1]])  # [choices]
            allowed = np.take_along_axis(flat, starts + places, 1)  # [L, choices]
            if not allowed.all():
                step = int(allowed.all(1).argmin())
                text = f"the action of step {step} is {array[step]}, which its mask forbids"
                raise SessionError(Code.WRONG_SHAPE, text)

    def _as_chosen(self, actions: Tree) -> Tree:
        """Return actions in the policy's dtypes."""
        return unflatten(
            [
                (path, at(actions, path).astype(acted_dtype(space), copy=False))
                for path, space in self._leaves
            ]
        )


def _version(session: GatewaySession, message: pb.Recording) -> Version | None:
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


class LocalInference:
    """Makes rows of recordings, and sends policies.

    A part of `GatewayServer`, used within its `at_work`.

    Args:
        wake: requests a turn soon; any thread may call it.
    """

    def __init__(
        self,
        manager: SessionManager,
        player: ModulePlayer,
        curriculum: Curriculum,
        wake: Callable[[], None],
    ) -> None:
        self.waiting: deque[Recording] = deque()  # unused recordings, the oldest first
        self.bytes_waiting = 0  # size of their messages
        self._manager, self._player, self._wake = manager, player, wake
        self._curriculum = curriculum
        chosen = player.policy.module_to_env.action_space
        self._reader = RecordingReader(AgentInterface(player.interface.spaces[0], chosen))
        self._publisher = Publisher(player.policy, *player.interface.spaces)
        self._asking: list[GatewaySession] = []  # sessions that wait for a policy
        self._announced = Version(0, 0)  # to all sessions

    # -- messages of sessions ---------------------------------------------------------------------

    def recording(self, session: GatewaySession, message: pb.Recording, raw: bytes) -> None:
        """Check and queue a recording, from its message.

        Raises:
            SessionError: the recording is not valid, or does not fit this session.
        """
        session.must_be(pb.LOCAL_INFERENCE, pb.LOGGED_DATA)
        if session.repeats(message.seq, raw):
            return
        player, recording = self._player, self._reader.read(session, message)
        self._must_be_known(recording)
        # Recordings wait in memory, and may come faster than a learner requests them.
        recording.bytes = len(raw)
        if self.bytes_waiting + recording.bytes > _MOST_WAITING_BYTES:
            text = "more recordings wait than the gateway can hold: send smaller ones"
            raise SessionError(Code.FULL, text, message.seq, retryable=True)
        session.alone.acted[recording.environment] = not recording.ends
        if player.episode_log is not None:
            player.episode_log.record(
                recording.place,
                recording.observations,
                recording.actions,
                recording.rewards,
                starts=recording.starts,
                terminated=recording.terminated if recording.ends else None,
            )

        # Connectors learn from each observation once.
        live = np.ones(len(recording.rewards) + 1, np.bool_)  # [L + 1]
        live[0] = recording.starts  # otherwise the last recording ended with it
        recording.observations = player.see(recording.observations, live)  # [L + 1, ...]
        self.waiting.append(recording)
        self.bytes_waiting += recording.bytes
        player.counts["steps_recorded"] += len(recording.rewards)

    def resumed(self, session: GatewaySession) -> None:
        """Announce weights again, because a broken stream may have lost the message."""
        if session.has_policy is not None:
            session.wants_news = True
            self._announce(session)

    def policy(self, session: GatewaySession, request: pb.PolicyRequest) -> None:
        """Queue a session's request for a policy, and start the export.

        Raises:
            SessionError: its mode has no policies, or the run has no policy of this name.
        """
        session.must_be(pb.LOCAL_INFERENCE)
        if request.policy not in ("", DEFAULT_MODULE):
            text = f"the policy {request.policy[:64]!r} is asked for, and this run has"
            text += f" {DEFAULT_MODULE!r}: ask for that one, or leave the name out"
            raise SessionError(Code.NOT_SERVED, text)
        self._publisher.begin(self._wake)
        if session not in self._asking:
            self._asking.append(session)

    # -- answers ----------------------------------------------------------------------------------

    def advance(self, wanted: int) -> None:
        """Answer used recordings, and requests for policies.

        Args:
            wanted: number of rows that may begin.
        """
        player = self._player
        newest = to_message(player.version)
        for recording in self._use_waiting(wanted) if self.waiting else ():
            if (infos := recording.session.infos) is not None:
                infos.record(
                    recording.environment,
                    recording.infos,
                    starts=recording.starts,
                    ends=recording.ends,
                )
            # The newest version lets a simulator decide whether to pull it.
            recorded = pb.Recorded(
                seq=recording.seq,
                stale=recording.stale,
                newest=newest,
                parameters=self._curriculum.news_for(recording.session),
            )
            message = pb.ToSimulator(recorded=recorded).SerializeToString()
            recording.session.answers(recording.seq, message)
        if player.version == Version(0, 0):
            return  # no weights yet
        # An export takes seconds in a thread of its own, so requests wait here.
        if self._asking and (self._publisher.ready or self._publisher.failure):
            asking, self._asking = self._asking, []
            for session in asking:
                self._give_policy(session)
        if player.version != self._announced:
            self._announced = player.version
            for session in self._manager.sessions.by_id.values():
                self._announce(session)

    def _give_policy(self, session: GatewaySession) -> None:
        stream, version = session.stream, self._player.version
        if stream is None:
            return  # the simulator will request it again
        if self._publisher.failure:
            text = f"the policy cannot be handed out: {self._publisher.failure}"
            return self._manager.fail(session, SessionError(Code.NOT_EXPORTED, text))
        session.has_policy, session.wants_news = version, True
        for chunk in self._publisher.chunks(version):
            stream.send(chunk.SerializeToString())

    def _announce(self, session: GatewaySession) -> None:
        newest = self._player.version
        if session.stream is None or not session.wants_news or session.has_policy == newest:
            return
        session.wants_news = False
        news = pb.NewPolicy(policy=DEFAULT_MODULE, version=to_message(newest))
        session.stream.send(pb.ToSimulator(new_policy=news).SerializeToString())

    def _must_be_known(self, recording: Recording) -> None:
        """Check that its weights were sent from here, and are in order."""
        version, versions = recording.version, recording.session.alone.versions
        if version is None:
            return
        if not (self._is_stale(recording) or self._publisher.gave(version)):
            text = (
                f"weights {tuple(version)} acted, but were never sent from here: send the "
                "version of the policy that acted"
            )
            raise SessionError(Code.UNKNOWN_VERSION, text, recording.seq)
        if version < versions.get(recording.environment, version):
            text = f"environment {recording.environment}: older weights acted than before"
            raise SessionError(Code.OUT_OF_ORDER, text, recording.seq)
        versions[recording.environment] = version

    # -- rows of recordings -----------------------------------------------------------------------

    def _use_waiting(self, wanted: int) -> list[Recording]:
        """Make rows of waiting recordings; return the used recordings."""
        done: list[Recording] = []
        later: deque[Recording] = deque()
        full: set[int] = set()  # places with a recording that waits
        here = self._manager.sessions.by_id
        while self.waiting:
            recording = self.waiting.popleft()
            if recording.session.id not in here:
                self._player.counts["steps_lost"] += recording.left
                continue
            # Recordings of one environment continue each other, so none may overtake.
            if recording.place not in full:
                wanted -= self._use(recording, wanted)
            if recording.left:
                later.append(recording)
                full.add(recording.place)
            else:
                done.append(recording)
        self.waiting = later
        self.bytes_waiting = sum(each.bytes for each in later)
        return done

    def _use(self, recording: Recording, wanted: int) -> int:
        """Use steps while rows are wanted; return the number of new rows."""
        player, place, begun = self._player, recording.place, 0
        of, steps = player.of, player.rows.steps
        if recording.starts and not recording.taken and of["length"][place]:
            player.cut(place)  # another episode was running there
        if self._is_stale(recording):
            player.counts["steps_stale"] += recording.left
            recording.stale = True
            player.pause(np.array([place]))
            self._follow(recording, recording.left)
            self._count(recording, recording.left)
        # A row that has begun is filled in any case; only a new one needs a request.
        while recording.left and (of["row"][place] >= 0 or begun < wanted):
            # A recording may have more steps than its row has left.
            is_new = bool(of["row"][place] < 0)
            begun += is_new
            filled = 0 if is_new else int(of["step"][place])
            self._write(recording, min(recording.left, steps - filled))
        return begun

    def _is_stale(self, recording: Recording) -> bool:
        version, newest = recording.version, self._player.version
        return version is not None and newest.update - version.update > self._player.row_age

    def _write(self, recording: Recording, count: int) -> None:
        """Write the next steps of a recording into its row."""
        player, place, begin = self._player, recording.place, recording.taken
        of, rows, end = player.of, player.rows, begin + count
        steps = slice(begin, end)
        states = self._follow(recording, count)
        if of["row"][place] < 0:
            (row,) = rows.begin(np.array([place]), states, recorded=True)
            of["row"][place], of["step"][place] = row, 0
        row, step = int(of["row"][place]), int(of["step"][place])
        # The simulator's policy chose the actions: nothing is drawn here.
        rows.record(
            row,
            step,
            count,
            observations=take(recording.observations, steps),
            actions=take(recording.actions, steps),
            rewards=recording.rewards[steps],
            action_logp=recording.action_logp[steps],
        )
        # A segment begins with its row or its episode.
        if not (step and of["length"][place]):
            version = recording.version or player.version
            beginning = of["episode"][place], of["length"][place], *version
            at_step = np.array([row * rows.width + step])
            rows.begin_episodes(at_step, np.array([beginning], np.uint64))
        after = take(recording.observations, end)  # [...]
        if end == len(recording.rewards):
            rows.columns["terminated"][row, step + count - 1] = recording.terminated
            if recording.truncated:
                rows.columns["truncated"][row, step + count - 1] = True
                rows.ended_with(row, step + count - 1, after)
        # While recordings come, the row has not stalled.
        of["step"][place], of["acted_at"][place] = step + count, time.monotonic()
        self._count(recording, count)
        put(rows.columns["observations"], (row, step + count), after)
        if step + count == rows.steps:
            rows.finish(np.array([row]), np.array([rows.steps]))
            of["row"][place] = -1

    def _follow(self, recording: Recording, count: int) -> dict[str, Tree]:
        """Let the policy follow the next steps; return its states before them."""
        player, place = self._player, recording.place
        begin = recording.taken
        steps = slice(begin, begin + count)
        if not player.of["length"][place]:
            player.of["episode"][place] = player.new_episodes(1)[0]
        return player.policy.follow(
            place,
            take(recording.observations, steps),
            take(recording.actions, steps),
            recording.rewards[steps],
            first=recording.starts and not begin,
        )

    def _count(self, recording: Recording, count: int) -> None:
        """Count the next steps as used."""
        player, begin, places = self._player, recording.taken, np.array([recording.place])
        rewards = recording.rewards[begin : begin + count]
        player.of["length"][places] += count
        player.of["return"][places] += rewards.sum(dtype=np.float64)
        recording.taken += count
        if recording.left or not recording.ends:
            return
        player.counts["episodes"] += 1
        # Without a version, another policy acted: its return is not the return of this policy.
        player.end_episodes(places, counted=recording.version is not None)


_CHUNK = 1 << 20
#: Maximum number of sent versions to remember. Older versions are stale.
_MOST_GIVEN = 4096
_MODULE = "module."  # prefix of the names of a module's values in a graph


class Publisher:
    """Exports the policy once, in a thread, because it takes seconds.

    Models of other versions have the same graph with other weights.
    """

    def __init__(
        self, policy: Actor, observation_space: Space[Any], action_space: Space[Any]
    ) -> None:
        self.failure = ""  # why the export failed; "": it has not failed
        self._policy = policy
        self._spaces = observation_space, action_space
        self._begun = False
        self._exported: Any = None  # an onnx.ModelProto, with the weights sent last
        self._given: dict[Version, None] = {}
        self._model: tuple[Version, bytes] | None = None

    @property
    def ready(self) -> bool:
        return self._exported is not None

    def begin(self, done: Callable[[], None]) -> None:
        """Start the export once in another thread, which then calls `done`."""
        if self._begun:
            return
        self._begun = True
        policy = self._policy
        assert isinstance(policy.module, RLModule)
        try:
            # A copy, because the policy goes on acting meanwhile.
            own = deepcopy(policy.module), policy.connectors, policy.module_to_env
            graph = ActingGraph(*own, *self._spaces, explores=True)
        except Exception as error:  # of user modules and connectors
            self.failure = _error_text(error)
            return
        arguments = graph, done
        threading.Thread(target=self._export, args=arguments, name="export", daemon=True).start()

    def _constants(self) -> dict[str, NDArray[Any]]:
        """Return the graph's values that change during a run, by name."""
        policy = self._policy
        weights = {f"{_MODULE}{name}": array for name, array in policy.weights().items()}
        return {**weights, **policy.connectors.numbers()}

    def gave(self, version: Version) -> bool:
        """Return whether these weights were sent."""
        return version in self._given

    def chunks(self, version: Version) -> Iterator[pb.ToSimulator]:
        """Yield messages with the current policy."""
        if self._model is None or self._model[0] != version:
            self._model = version, self._with_weights()
        model = self._model[1]
        self._given.pop(version, None)
        self._given[version] = None
        while len(self._given) > _MOST_GIVEN:
            del self._given[next(iter(self._given))]
        # A broken stream may lose pieces, which the digest reveals.
        digest = hashlib.sha256(model).digest()
        named = to_message(version)
        for offset in range(0, len(model), _CHUNK):
            yield pb.ToSimulator(
                policy=pb.PolicyChunk(
                    policy=DEFAULT_MODULE,
                    version=named,
                    size=len(model),
                    sha256=digest,
                    offset=offset,
                    data=model[offset : offset + _CHUNK],
                )
            )

    def _export(self, graph: ActingGraph, done: Callable[[], None]) -> None:
        try:
            model = to_onnx(graph, optimize=False).model_proto
            mine = {tensor.name for tensor in model.graph.initializer}
            ours = self._constants().keys()
            # Weights that only learners use are not in the model.
            odd = [name for name in mine if name.startswith(_MODULE) and name not in ours]
            odd += [name for name in ours - mine if not name.startswith(_MODULE)]
            if odd:
                raise ValueError(f"not under the names that they have here: {odd}")
            self._exported = model
        except Exception as error:  # of user modules and connectors
            self.failure = _error_text(error)
        finally:
            done()

    def _with_weights(self) -> bytes:
        """Return the model with the current weights."""
        from onnx import numpy_helper  # installed: the export used it

        constants = self._constants()
        for tensor in self._exported.graph.initializer:
            if (array := constants.get(tensor.name)) is not None:
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        whole: bytes = self._exported.SerializeToString()
        return whole


def _error_text(error: Exception) -> str:
    """Return the text of an error, with its class if that helps."""
    text = isinstance(error, ValueError | NotImplementedError) and str(error)
    return text or f"{type(error).__name__}: {error}"
