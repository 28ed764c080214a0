"""Sessions of simulators: agents with their spaces, episodes, and batches of steps."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from gymnasium import Space
from numpy.typing import NDArray

from juggler.envrunner.environments.action_masks import LegalActions, find_non_binary
from juggler.envrunner.info_numbers import LARGEST, MOST_EPISODES, InfoNumber, keep_newest
from juggler.envrunner.multi_agent.line_up import LineUps
from juggler.gateway.session_errors import Code, SessionError
from juggler.runtime.connectors import leaves
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.near_matches import one_of
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.structures import choices_of, find_outside, space_leaves, zeros
from juggler.runtime.wire.trees import Path, Tree, dtype_to_number, flatten, nest, path_name
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from juggler.runtime.wire.v1.tensors_pb2 import DType

if TYPE_CHECKING:
    from juggler.gateway.transport import GatewayStream


#: How long a session waits for a simulator that vanished.
RESUME_SECONDS = 60.0
BATCHES_IN_FLIGHT = 8
_NAMES = {number: name for name, number in DType.items()}
_LARGEST = np.finfo(np.float32).max


class Leaf:
    """One array of a space."""

    def __init__(self, path: Path, space: Space[Any]) -> None:
        self.path = path
        self.space = space
        assert space.dtype is not None
        assert space.shape is not None
        self.dtype = np.dtype(space.dtype).newbyteorder("<")
        self.shape = space.shape
        self.row_bytes = self.dtype.itemsize * prod(self.shape)
        self.number = dtype_to_number(self.dtype)


class SpaceLayout:
    """The arrays of a space on the wire.

    Raises:
        UnsupportedSpace: it cannot be sent as arrays.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.leaves = [Leaf(path, leaf) for path, leaf in space_leaves(space)]
        self._places = {leaf.path: place for place, leaf in enumerate(self.leaves)}

    def raw(self, tensors: Sequence[pb.NamedTensor], rows: int, what: str) -> list[bytes]:
        """Return the bytes of each leaf, in order.

        Raises:
            SessionError: an array is missing, unknown, or does not fit the space.
        """
        if len(tensors) != len(self.leaves):
            raise self._wrong_arrays(tensors, what)
        found: list[Any] = [None] * len(self.leaves)  # the bytes of each leaf
        for tensor in tensors:
            place = self._places.get(tuple(tensor.path))
            if place is None or found[place] is not None:
                raise self._wrong_arrays(tensors, what)
            # NumPy would read any bytes of a fitting length, so dtype and shape are compared first.
            leaf, data = self.leaves[place], tensor.data
            given, expected = tuple(tensor.shape), (rows, *leaf.shape)
            if given != expected or tensor.dtype != leaf.number:
                dtype = _NAMES.get(tensor.dtype, f"dtype {tensor.dtype}")
                raise SessionError(
                    Code.WRONG_SHAPE,
                    f"{what} at {path_name(leaf.path)}: {dtype} and shape {list(given)}; send "
                    f"{_NAMES[leaf.number]} and shape {list(expected)}, as the space says",
                )
            # A right shape may come with too few bytes.
            if len(data) != rows * leaf.row_bytes:
                raise SessionError(
                    Code.WRONG_SHAPE,
                    f"{what} at {path_name(leaf.path)}: {len(data)} bytes, and a shape of "
                    f"{list(expected)} takes {rows * leaf.row_bytes}",
                )
            found[place] = data
        return found

    def _wrong_arrays(self, tensors: Sequence[pb.NamedTensor], what: str) -> SessionError:
        """Return the error of arrays that are not those of the space."""
        paths = [tuple(each.path) for each in tensors[:20]]
        sent, named = (", ".join(map(path_name, e)) for e in (paths, [*self._places][:20]))
        text = f"{len(tensors)} arrays of {what}{' at ' * bool(sent)}{sent}"
        return SessionError(Code.WRONG_SHAPE, f"{text}: send one for each of {named}")

    def tree(self, raws: Sequence[list[bytes]], rows: int) -> Tree:
        """Join several batches to arrays [rows, ...], in new memory."""
        arrays = []
        for place, leaf in enumerate(self.leaves):
            joined = bytearray().join([raw[place] for raw in raws])
            if leaf.dtype == np.bool_:
                array = np.frombuffer(joined, np.uint8) != 0
            else:
                array = np.frombuffer(joined, leaf.dtype)
            arrays.append((leaf.path, array.reshape(rows, *leaf.shape)))  # [rows, ...]
        return nest(arrays)


class AgentInterface:
    """The observations and actions of agents with equal spaces.

    Raises:
        UnsupportedSpace: a space cannot be sent as arrays.
        ValueError: masks do not fit the actions.
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        self.spaces = observation_space, action_space
        # The same as messages, which differ wherever the spaces do.
        self.messages = space_to_message(observation_space), space_to_message(action_space)
        self.observations, self.actions = SpaceLayout(observation_space), SpaceLayout(action_space)
        self._choices = choices_of(leaves.observed_leaves(observation_space).items())
        self._legal = LegalActions.of(observation_space, action_space)
        # [1, ...] placeholder of a missing observation.
        self.nothing = zeros(observation_space, (1,))
        if leaves.holds_masks(observation_space):
            for _, mask in flatten(leaves.at(self.nothing, (ACTION_MASK,))):
                mask[...] = 1

    def first_bad(self, observations: Tree, masks: bool = True) -> tuple[int, SessionError] | None:
        """Return the first unusable row and its error, or None.

        Args:
            masks: whether each action mask must allow an action.
        """
        for path, array in flatten(observations):
            # A NaN compares as false.
            if array.dtype.kind != "f" or (good := np.abs(array) <= _LARGEST).all():
                continue
            row = int(np.argwhere(~good)[0][0])
            what = f"the observation{f' at {path_name(path)}' if path else ''} is"
            text = f"{what} NaN or infinite: the simulator must give finite numbers"
            if np.isfinite(array[row]).all():
                text = f"{what} beyond float32, in which policies compute: scale it"
            return row, SessionError(Code.NOT_FINITE, text)
        # Encoders use these numbers as indices.
        if found := find_outside(self._choices, observations):
            (row, *_), what = found
            return row, SessionError(Code.WRONG_SHAPE, f"the observation{what}")
        if self._legal is None:
            return None
        given = leaves.at(observations, (ACTION_MASK,))
        if found := find_non_binary(given):
            (row, *_), what = found
            return row, SessionError(Code.NO_LEGAL_ACTION, what)
        for _, legal in self._legal.has_legal_action(given) if masks else ():
            if not legal.all():
                text = "its action mask allows no action: end the episode instead"
                return int(legal.argmin()), SessionError(Code.NO_LEGAL_ACTION, text)
        return None


class SessionAgent:
    """One agent of a simulator, in each of its N environments.

    Args:
        name: its id; "": the simulator has one agent.
        seats: [N] its places in each player that may act for it, by player.

    Attributes:
        everyone: numbers of all environments, in order.
        waiting: 1 for each environment where its action is due, by number.
        acted: 1 for each environment where it has had an action in the episode.
        versions: version of the last weights in each environment, if its simulator acts.
    """

    def __init__(
        self, index: int, name: str, seats: Mapping[str, list[int]], interface: AgentInterface
    ) -> None:
        self.index, self.name, self.interface = index, name, interface
        self.seats = {player: np.array(each, np.intp) for player, each in seats.items()}
        self.of_whom = f"agent {name!r} of " if name else ""
        count = len(self.places)
        self.everyone = list(range(count))
        self._ones = b"\x01" * count
        self.waiting = bytearray(count)
        self.acted = bytearray(count)
        self.versions: dict[int, Version] = {}

    @property
    def player(self) -> str:
        """The first of its players, which all have the same spaces."""
        return next(iter(self.seats))

    @property
    def places(self) -> NDArray[np.intp]:
        """Its places [N] in this player."""
        return next(iter(self.seats.values()))

    def player_of(self, module_id: str) -> str:
        """Return a module's player, or any player if it has left."""
        if module_id in self.seats:
            return module_id
        own = (each for each in self.seats if each.startswith(f"{module_id}:"))
        return next(own, self.player)

    def at(self, environment: int) -> str:
        """Name an environment of this agent, for messages."""
        return f"{self.of_whom}environment {environment}"

    def named_in(self, error: SessionError) -> SessionError:
        """Name this agent in an error, since its rows have own numbers."""
        if not self.name or repr(self.name) in str(error):
            return error
        return SessionError(error.code, f"agent {self.name!r}: {error}", error.seq, error.retryable)

    def asks(self, environments: list[int]) -> None:
        """Note that actions in these environments are due."""
        if environments is self.everyone:
            self.waiting = bytearray(self._ones)
        else:
            for environment in environments:
                self.waiting[environment] = 1

    def acts(self, environments: list[int]) -> None:
        """Note that it got its actions in these environments."""
        if environments is self.everyone:
            self.waiting, self.acted = bytearray(len(self._ones)), bytearray(self._ones)
        else:
            for environment in environments:
                self.waiting[environment], self.acted[environment] = 0, 1


class GatewaySession:
    """A session of one simulator.

    Args:
        episodes: episodes of its environments, with their players; None: it has one agent.
        infos: numbers of its steps; None: no numbers.

    Attributes:
        token: token with which its simulator resumes it.
        batches_in_flight: maximum batches of steps, or recordings, without an answer.
        has_policy: version of the policy that it got last; None: it has requested no policy.
        wants_news: the next version must be announced to it.
        last_seq: highest number that has arrived.
        stream: its connection; None: its simulator has vanished.
        peer: address of its simulator, for logs; set by the manager.
        dialed: address that its simulator dialed; set by the manager.
        seed: seed of its episodes; set by the manager.
        parameters: parameters that its simulator has, by name; None: unknown.
        lost_at: when it vanished, in seconds of `time.monotonic`.
        knows_of_wait: it has had a notice since its last answer.
    """

    def __init__(
        self,
        agents: list[SessionAgent],
        hello: pb.Hello,
        stream: GatewayStream,
        episodes: SharedEpisodes | None = None,
        infos: SessionInfos | None = None,
    ) -> None:
        self.hello = hello
        self.id = secrets.token_hex(6)
        self.token = secrets.token_hex(16)
        self.agents, self.episodes, self.infos = agents, episodes, infos
        self.mode = hello.mode
        self.environments = hello.environments
        remote = hello.mode == pb.REMOTE_INFERENCE
        # Episodes end at any time, so one environment may have many recordings.
        self.batches_in_flight = BATCHES_IN_FLIGHT * (1 if remote else hello.environments)
        self.has_policy: Version | None = None
        self.wants_news = False
        self.last_seq = 0
        self.stream: GatewayStream | None = stream
        self.peer = self.dialed = ""
        self.seed = 0
        self.parameters: Mapping[str, float] | None = None
        self.lost_at = 0.0
        self.knows_of_wait = False
        self._digests: dict[int, int] = {}  # of batches of this stream
        self._unanswered: set[int] = set()
        self._answers: OrderedDict[int, bytes] = OrderedDict()

    def must_be(self, *modes: pb.Mode) -> None:
        """Check the mode of this session.

        Raises:
            SessionError: a message is for another mode.
        """
        if self.mode not in modes:
            names = one_of(pb.Mode.Name(mode) for mode in modes)
            text = f"a message of the mode {names}: this session is {pb.Mode.Name(self.mode)}"
            raise SessionError(Code.WRONG_MODE, text)

    def repeats(self, seq: int, raw: bytes) -> bool:
        """Note an incoming batch, from its message; return whether it came before.

        If it has an answer, the answer is sent again.

        Raises:
            SessionError: it is out of order, or exceeds the limit in flight.
        """
        digest = xxhash.xxh3_64_intdigest(raw)
        # Other steps with a number that has been used would be lost without a word.
        is_same = self._digests.get(seq, digest) == digest
        if seq == self.last_seq + 1:
            if len(self._unanswered) >= self.batches_in_flight:
                text = f"{len(self._unanswered)} batches have no answer yet: wait for one"
                raise SessionError(Code.TOO_MANY_IN_FLIGHT, text, seq)
            self.last_seq = seq
            self._unanswered.add(seq)
            self._digests[seq] = digest
            return False
        # After a break, a simulator sends again what had no answer.
        if is_same and seq in self._unanswered:
            return True
        if is_same and seq in self._answers:
            if self.stream is not None:
                self.stream.send(self._answers[seq])
            return True
        text = f"a batch with seq {seq}, but {self.last_seq + 1} comes next"
        if not is_same:
            text += f": another one came as {seq} before"
        elif 0 < seq <= self.last_seq:
            text += f"; answers are kept for the last {self.batches_in_flight}"
        raise SessionError(Code.OUT_OF_ORDER, text, seq)

    def answers(self, seq: int, message: bytes) -> None:
        """Send the answer to a batch, and keep it for a resume."""
        self.knows_of_wait = False
        self._unanswered.discard(seq)
        self._answers[seq] = message
        if len(self._answers) > self.batches_in_flight:
            oldest, _ = self._answers.popitem(last=False)
            self._digests.pop(oldest, None)
        if self.stream is not None:
            self.stream.send(message)

    @property
    def is_owed(self) -> bool:
        """Whether its simulator waits for an answer."""
        return bool(self._unanswered)

    @property
    def alone(self) -> SessionAgent:
        """The agent of a session with one agent."""
        (agent,) = self.agents
        return agent

    def vanishes(self) -> None:
        self.stream, self.lost_at = None, time.monotonic()

    def resumes(self, stream: GatewayStream) -> None:
        """Continue on another stream.

        It may write the same batch in other bytes.
        """
        self.stream, self._digests = stream, {}


class Sessions:
    """The open sessions of a gateway.

    Args:
        resume_seconds: how long a session waits for a simulator that vanished.
    """

    def __init__(self, resume_seconds: float) -> None:
        # Open sessions, whether or not their simulators are connected.
        self.by_id: dict[str, GatewaySession] = {}
        self.resume_seconds = resume_seconds

    def resumed(self, hello: pb.Hello) -> GatewaySession:
        """Return the open session that a hello resumes.

        Raises:
            SessionError: no open session has the token, or it began with another hello.
        """
        token = hello.resume_token
        session = next((each for each in self.by_id.values() if each.token == token), None)
        if session is None:
            raise SessionError(
                Code.UNKNOWN_SESSION,
                "the resume token belongs to no session: it was closed, waited for more than "
                f"{self.resume_seconds:.0f} s, or was another gateway's that was here before. "
                "Begin a new one without a token",
                retryable=True,
            )
        # Another hello would not fit the session's places and rows.
        before, named = session.hello, session.episodes is not None
        agents = [agent.id if named else "" for agent in hello.agents]
        for name, same in (
            ("mode", hello.mode == before.mode),
            ("environments", hello.environments == before.environments),
            ("agents", agents == [agent.name for agent in session.agents]),
            ("info_names", hello.info_names == before.info_names),
        ):
            if not same:
                text = f"a session goes on with other {name}: send the hello that it began with"
                raise SessionError(Code.WRONG_SPACES, text)
        return session

    @property
    def asking(self) -> int:
        """Number of connected simulators that get their actions here."""
        return sum(
            each.mode == pb.REMOTE_INFERENCE and each.stream is not None
            for each in self.by_id.values()
        )

    def vanished(self) -> list[GatewaySession]:
        """Return sessions without a simulator, the longest without one first."""
        waiting = [each for each in self.by_id.values() if each.stream is None]
        return sorted(waiting, key=lambda each: each.lost_at)

    def overdue(self) -> list[GatewaySession]:
        """Return sessions that have waited too long for their simulators."""
        since = time.monotonic() - self.resume_seconds
        return [each for each in self.vanished() if each.lost_at < since]


_OUT, _ACTS, _ENDED = 0, 1, 2

#: Maximum number of ended episodes until the next report; the oldest are dropped. The driver
#: accepts this many with a batch of any size.
MOST_UNREPORTED = 1 << 16


def forget_oldest(ended: list[Any]) -> None:
    """Drop the oldest of too many episodes."""
    del ended[:-MOST_UNREPORTED]


def _acting(part: AgentSteps) -> list[int]:
    """Return the environments where an agent acts next."""
    out = set(part.paused)
    return [each for at, each in enumerate(part.environments) if at not in out]


class BookedBatch(NamedTuple):
    """Results of environments in a batch of steps."""

    env_returns: NDArray[np.float64]  # [L] returns of ended episodes
    env_lengths: NDArray[np.intp]  # [L] their environment steps
    agent_returns: NDArray[np.float64]  # [L, A] each agent's return in them; NaN if it did not act
    steps: int  # number of environment steps


class SharedEpisodes:
    """The episodes of N environments with A agents, and their line-ups.

    An agent takes part from its first observation until its end. The episode of an environment ends
    when no agent takes part in it. Until then, an agent that has ended cannot act.

    Args:
        line_ups: draws a line-up for each episode; None: the same modules act in all episodes.
        played_by: modules that may act, by name of the agent.
        order: names of agents, in the order of the line-ups.
        numbers: numbers of the N environments among the environments of all sessions.

    Attributes:
        drawn: line-ups are drawn.
    """

    def __init__(
        self,
        line_ups: LineUps | None,
        played_by: Mapping[str, Sequence[str]],
        order: Sequence[str],
        numbers: range,
    ) -> None:
        self.names, self.drawn = tuple(played_by), line_ups is not None
        self._line_ups, self._numbers = line_ups, np.array(numbers, np.intp)
        at_first = np.array([ids[0] for ids in played_by.values()], np.object_)
        self._players = np.tile(at_first, (len(numbers), 1))  # [N, A] modules that act now
        self._column = np.array([order.index(name) for name in self.names], np.intp)  # [A]
        shape = len(self.names), len(numbers)
        self._stages: NDArray[np.int8] = np.zeros(shape, np.int8)
        self._returns = np.zeros(shape)
        self._acted = np.zeros(shape, np.bool_)  # in the episode
        self._lengths = np.zeros(len(numbers), np.intp)

    def follow(
        self, parts: Sequence[AgentSteps], continuing: Collection[int] = ()
    ) -> tuple[list[int], list[int]]:
        """Return environments whose episodes end, and whose next episodes begin.

        Args:
            continuing: environments whose episodes continue with the agents that act next, even if
                all earlier agents have ended.

        Raises:
            SessionError: an agent would act although it has ended.
        """
        stages = self._stages
        touched: set[int] = set()
        for part in parts:
            ended = [part.environments[at] for at in part.ended]
            stages[part.agent.index, ended] = _ENDED
            touched.update(ended)
        if continuing:
            touched -= {*continuing} & {each for part in parts for each in _acting(part)}
        # A message may end one episode and begin the next, so ends come first.
        over = [each for each in sorted(touched) if not (stages[:, each] == _ACTS).any()]
        stages[:, over] = _OUT
        began: list[int] = []
        for part in parts:
            acting = _acting(part)
            of_agent = stages[part.agent.index, acting]  # [B]
            gone = of_agent == _ENDED
            if gone.any():
                raise SessionError(
                    Code.OUT_OF_ORDER,
                    f"{part.agent.at(acting[int(gone.argmax())])} acts, and has ended in this "
                    "episode: pause it until all agents that act there have ended",
                )
            # An agent that acts between episodes begins the next one.
            fresh = (stages[:, acting] == _OUT).all(0)  # [B]
            began += [each for each, is_fresh in zip(acting, fresh, strict=True) if is_fresh]
            stages[part.agent.index, acting] = _ACTS
        return over, sorted(began)

    def book(
        self, parts: Sequence[AgentSteps], over: list[int], idle: Mapping[int, float]
    ) -> BookedBatch:
        """Add the rewards of a batch of steps.

        A length is a number of environment steps: each batch with rewards for an environment is one
        step.

        Args:
            idle: by environment, rewards of agents that never acted in an ended episode.
        """
        stepped: set[int] = set()
        for part in parts:
            rewarded = [part.environments[at] for at in part.rewarded]
            self._returns[part.agent.index, rewarded] += [part.rewards[at] for at in part.rewarded]
            self._acted[part.agent.index, rewarded] = True
            stepped.update(rewarded)
        self._lengths[list(stepped)] += 1
        booked = self.so_far(over)
        self._returns[:, over], self._acted[:, over], self._lengths[over] = 0, False, 0
        totals = booked.env_returns + [idle.get(each, 0.0) for each in over]  # [L]
        for part in parts:  # these may belong to the next episode
            for at, reward in part.early:
                self._returns[part.agent.index, part.environments[at]] += reward
        return booked._replace(env_returns=totals, steps=len(stepped))

    def so_far(self, environments: Sequence[int]) -> BookedBatch:
        """Return results of running episodes in environments [L], without steps."""
        at = list(environments)
        returns = self._returns[:, at]  # [A, L]
        of_agents = np.where(self._acted[:, at], returns, np.nan)  # [A, L]
        return BookedBatch(returns.sum(0), self._lengths[at], of_agents.T, 0)

    # -- line-ups ---------------------------------------------------------------------------------

    def players(self, environments: Sequence[int]) -> NDArray[np.object_]:
        """Return the ids of modules [K, A] in environments [K]."""
        return self._players[np.array(environments, np.intp)]

    def begin(self, environments: Sequence[int], evaluated: Sequence[int]) -> None:
        """Draw line-ups for new episodes in environments [K].

        Args:
            evaluated: environments among them that play for an evaluation.

        Raises:
            LineUpError: an environment gets no line-up.
        """
        assert self._line_ups is not None
        began = np.array(environments, np.intp)
        line_up = self._line_ups.begin(
            self._numbers[began], self._numbers[list(evaluated)].tolist()
        )
        self._players[began] = line_up.players.reshape(len(began), -1)[:, self._column]  # [K, A]

    def report_ended(self, environments: Sequence[int], booked: BookedBatch) -> None:
        """Report ended episodes of environments [L] to the line-ups."""
        if self._line_ups is not None:
            in_order = np.empty_like(booked.agent_returns)  # [L, A]
            in_order[:, self._column] = booked.agent_returns
            self._line_ups.ended(self._numbers[list(environments)], in_order, booked.env_lengths)

    def leave(self) -> None:
        """Drop running episodes: other environments play a league's matches."""
        if self._line_ups is not None:
            self._line_ups.abandon(self._numbers.tolist())


class SessionInfos:
    """Sums up the infos of a session's steps over episodes.

    Args:
        names: names of the K numbers of a step.
        agents: A, number of agents in each environment.
        apart: names of agents with separate numbers; (): numbers are not separate.
        environments: N.
        newest: gets the numbers of episodes, by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        agents: int,
        apart: Sequence[str],
        environments: int,
        newest: dict[str, deque[InfoNumber]],
    ) -> None:
        before = [f"{agent}/" for agent in apart] or [""] * agents
        self._names = [
            (a, k, b + name) for a, b in enumerate(before) for k, name in enumerate(names)
        ]
        self._newest = newest
        # [4, N, A, K] sums, counts, least and most
        start = np.array([0, 0, np.inf, -np.inf])[:, None, None, None]
        self._start = np.broadcast_to(start, (4, environments, agents, len(names)))
        self._numbers = self._start.copy()

    def see(self, parts: Iterable[AgentSteps], over: Sequence[int]) -> None:
        """Add the numbers of a batch of steps."""
        for part in parts:
            if part.infos is not None and part.rewarded:
                rows = [part.environments[at] for at in part.rewarded]  # [R]
                self._add(rows, part.agent.index, part.infos[part.rewarded, None])
        self._end(over)

    def record(
        self, environment: int, infos: NDArray[np.float64] | None, *, starts: bool, ends: bool
    ) -> None:
        """Add the numbers of the L steps of a recording.

        Args:
            infos: [L, K]; None: no numbers.
        """
        if starts:
            self._end([environment])  # the previous episode
        if infos is not None:
            self._add([environment], 0, infos[None])
        if ends:
            self._end([environment])

    def _add(self, environments: list[int], agent: int, infos: NDArray[np.float64]) -> None:
        """Add numbers [R, L, K] of steps in environments [R]."""
        at, valid = (environments, agent), np.abs(infos) <= LARGEST  # false with a NaN
        sums, counts, least, most = self._numbers
        sums[at] += np.where(valid, infos, 0.0).sum(1)
        counts[at] += valid.sum(1)
        least[at] = np.minimum(least[at], np.where(valid, infos, np.inf).min(1))
        most[at] = np.maximum(most[at], np.where(valid, infos, -np.inf).max(1))

    def _end(self, environments: Sequence[int]) -> None:
        """End the episodes of environments [E]."""
        if not environments:
            return
        ended = list(environments)
        sums, counts, least, most = self._numbers[:, ended]  # [E, A, K] each
        means = sums / np.maximum(counts, 1)  # [E, A, K]
        for a, k, name in self._names:
            gave = counts[:, a, k].nonzero()[0][-MOST_EPISODES:]
            if len(gave):
                columns = ([*each[gave, a, k].tolist()] for each in (means, least, most))
                numbers = [InfoNumber(*each) for each in zip(*columns, strict=True)]
                keep_newest(self._newest, {name: numbers})
        self._numbers[:, ended] = self._start[:, ended]


@dataclass(slots=True, eq=False)
class AgentSteps:
    """R rows of one agent of a session.

    Most columns are lists, because arrays are built for the rows of many sessions at once.
    """

    agent: SessionAgent
    batch: StepMessage
    environments: list[int]  # [R] their numbers in the session
    rewards: list[float]  # [R]
    # Indices of rows whose reward follows an action, if the session counts episodes or has infos.
    rewarded: list[int]
    terminated: list[int]  # indices of rows where the episode ended
    truncated: list[int]  # indices of rows where the episode was cut off
    paused: list[int]  # indices of rows that need no action
    raw: list[bytes]  # bytes of each leaf of the observations
    finals: Any  # [K, ...] the last observations of the K truncated rows
    infos: NDArray[np.float64] | None  # [R, K] numbers of the last step; None: no numbers
    # Rewards from before the first action in an episode, with their indices.
    early: list[tuple[int, float]]
    begin: int = 0  # index of the first row among all rows that were read together
    actions: Sequence[Any] = ()  # bytes of each leaf of the actions so far
    # Players and versions of the weights that chose them.
    acted: list[tuple[str, Version]] = field(default_factory=list)
    due: int = 0  # shares that have no actions yet

    @property
    def rows(self) -> int:
        """Number of rows, R."""
        return len(self.environments)

    @property
    def ended(self) -> list[int]:
        """Indices of rows where the episode ended or was cut off."""
        return [*self.terminated, *self.truncated]


@dataclass(slots=True, eq=False)
class StepMessage:
    """A batch of steps of a session's agents, from one message."""

    session: GatewaySession
    seq: int
    parts: list[AgentSteps] = field(default_factory=list)  # rows of different agents
    over: list[int] = field(default_factory=list)  # environments whose episodes end
    # By environment, rewards of agents that never acted in an ended episode.
    idle: dict[int, float] = field(default_factory=dict)
    # Environments whose next episodes begin, if the session counts episodes.
    began: list[int] = field(default_factory=list)
    # Environments whose next episodes an evaluation plays.
    evaluated: list[int] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)  # seconds of `time.perf_counter`
