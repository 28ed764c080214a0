"""Sessions of simulators: agents, their episodes, and batches of their steps."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.info_numbers import (
    LARGEST,
    LONGEST_NAME,
    MOST_EPISODES,
    InfoNumber,
    is_name,
    keep_newest,
    most_names,
    names_another,
    reported_agents,
)
from juggler.envrunner.multi_agent.line_up import LineUp, LineUps, Players
from juggler.gateway.row_layout import AgentInterface
from juggler.gateway.session_errors import Code, SessionError
from juggler.runtime.episodes.version import Version
from juggler.runtime.near_matches import one_of
from juggler.runtime.wire.v1 import simulator_pb2 as pb

if TYPE_CHECKING:
    from juggler.gateway.transport import GatewayStream


PROTOCOL_MIN = PROTOCOL_MAX = 1
_MOST_AGENTS = 64  # of one environment
#: How long a session waits for a simulator that vanished.
RESUME_SECONDS = 60.0
BATCHES_IN_FLIGHT = 8
SERVED = (pb.REMOTE_INFERENCE, pb.LOCAL_INFERENCE, pb.LOGGED_DATA)


class SessionAgent:
    """One agent of a simulator, in each of its N environments.

    Args:
        name: its id; "": the simulator has one agent.
        seats: [N] its places in each player that may act for it, by player.

    Attributes:
        player: the first of these players; all have the same spaces.
        places: [N] its places in this player.
        everyone: numbers of all environments, in order.
        waiting: 1 for each environment where its action is due, by number.
        acted: 1 for each environment where it has had an action in the episode.
        versions: version of the last weights in each environment, if its simulator acts.
    """

    def __init__(
        self, index: int, name: str, seats: Mapping[str, list[int]], interface: AgentInterface
    ) -> None:
        self.index, self.name, self.interface = index, name, interface
        self.seats: dict[str, NDArray[np.intp]] = {}
        self.of_whom = f"agent {name!r} of " if name else ""
        for player, places in seats.items():
            self.seat(player, places)
        count = len(self.places)
        self.everyone = list(range(count))
        self._ones = b"\x01" * count
        self.waiting = bytearray(count)
        self.acted = bytearray(count)
        self.versions: dict[int, Version] = {}

    def seat(self, player: str, places: list[int]) -> None:
        """Add a player that may act for it."""
        self.seats[player] = np.array(places, np.intp)
        self._has_seats()

    def unseat(self, player: str) -> None:
        """Remove a player, if it has a seat."""
        self.seats.pop(player, None)
        self._has_seats()

    def _has_seats(self) -> None:
        self.player, self.places = next(iter(self.seats.items()))

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
        self._unanswered: set[int] = set()
        self._answers: OrderedDict[int, bytes] = OrderedDict()

    def must_be(self, *modes: pb.Mode) -> None:
        """Check the mode of this session."""
        if self.mode not in modes:
            names = one_of(pb.Mode.Name(mode) for mode in modes)
            text = f"a message of the mode {names}: this session is {pb.Mode.Name(self.mode)}"
            raise SessionError(Code.WRONG_MODE, text)

    def repeats(self, seq: int) -> bool:
        """Note an incoming batch; return whether it came before.

        If it has an answer, the answer is sent again.

        Raises:
            SessionError: it is out of order, or exceeds the limit in flight.
        """
        if seq == self.last_seq + 1:
            if len(self._unanswered) >= self.batches_in_flight:
                text = f"{len(self._unanswered)} batches have no answer yet: wait for one"
                raise SessionError(Code.TOO_MANY_IN_FLIGHT, text, seq)
            self.last_seq = seq
            self._unanswered.add(seq)
            return False
        # After a break, a simulator sends again what had no answer.
        if seq in self._unanswered:
            return True
        if seq in self._answers:
            if self.stream is not None:
                self.stream.send(self._answers[seq])
            return True
        text = f"a batch with seq {seq}, where {self.last_seq + 1} comes next"
        if seq <= self.last_seq:
            text += f"; answers are kept for the last {self.batches_in_flight}"
        raise SessionError(Code.OUT_OF_ORDER, text, seq)

    def answers(self, seq: int, message: bytes) -> None:
        """Send the answer to a batch, and keep it for a resume."""
        self.knows_of_wait = False
        self._unanswered.discard(seq)
        self._answers[seq] = message
        if len(self._answers) > self.batches_in_flight:
            self._answers.popitem(last=False)
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


class Sessions:
    """The open sessions of a gateway.

    Args:
        resume_seconds: how long a session waits for a simulator that vanished.

    Attributes:
        by_id: open sessions, whether or not their simulators are connected.
    """

    def __init__(self, resume_seconds: float) -> None:
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


def check_hello(hello: pb.Hello, known: Collection[str]) -> None:
    """Check the parts of a hello other than spaces.

    Args:
        known: names of the run's agents, in this session or in another one.
    """
    if not hello.protocol_min <= PROTOCOL_MAX or not hello.protocol_max >= PROTOCOL_MIN:
        raise SessionError(
            Code.UNSUPPORTED_VERSION,
            f"this gateway speaks version {PROTOCOL_MIN} to {PROTOCOL_MAX} of the protocol, the "
            f"simulator {hello.protocol_min} to {hello.protocol_max}, as protocol_min and "
            "protocol_max of its hello say: set both, or use one version of Juggler on both sides",
        )
    # Other versions may give these fields another meaning.
    if hello.mode not in SERVED:
        served = ", ".join(pb.Mode.Name(mode) for mode in SERVED)
        raise SessionError(Code.NOT_SERVED, f"mode {hello.mode} is not served here: use {served}")
    if not 1 <= len(hello.agents) <= _MOST_AGENTS:
        text = f"{len(hello.agents)} agents in one session: have 1 to {_MOST_AGENTS}"
        raise SessionError(Code.NOT_SERVED, text)
    if not hello.environments:
        raise SessionError(Code.UNKNOWN_ENVIRONMENT, "a session needs at least 1 environment")
    if hello.info_names:
        _check_info_names(hello, known)


def _check_info_names(hello: pb.Hello, known: Collection[str]) -> None:
    names, agents = hello.info_names, [agent.id for agent in hello.agents]
    apart = reported_agents(agents)
    most = most_names(apart)
    if hello.mode == pb.LOGGED_DATA:
        text = "the mode LOGGED_DATA has no info_names: another policy acted, and the run's metrics"
        raise SessionError(Code.NOT_SERVED, f"{text} are of its own. Leave them out")
    if len(names) > most:
        whose = f" for {len(agents)} agents" if len(agents) > 1 else ""
        text = f"{len(names)} info_names{whose}: have at most {most}"
        raise SessionError(Code.NOT_SERVED, text)
    # Names become metrics, beside those of other agents and sessions.
    for at, name in enumerate(names):
        if not is_name(name) or name in names[:at]:
            text = f"the name {name[:20]!r} among info_names: give each number one of its own, of"
            raise SessionError(Code.NOT_SERVED, f"{text} 1 to {LONGEST_NAME} printable characters")
        if names_another(name, apart, (*agents, *known)):
            text = (
                f"with {name!r} among info_names, a number would have the name of another agent's"
            )
            raise SessionError(Code.NOT_SERVED, f"{text}: rename it")


_OUT, _ACTS, _ENDED = 0, 1, 2
_NONE, _NONE_LONG = np.zeros(0), np.zeros(0, np.intp)

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
        at_first = {name: ids[0] for name, ids in played_by.items()}
        self._players = Players(len(numbers), self.names, at_first)
        self._column = np.array([order.index(name) for name in self.names], np.intp)  # [A]
        shape = len(self.names), len(numbers)
        self._stages: NDArray[np.int8] = np.zeros(shape, np.int8)
        self._between = set(range(len(numbers)))  # environments without an episode
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
            stages[part.index, ended] = _ENDED
            touched.update(ended)
        if continuing:
            touched -= {*continuing} & {each for part in parts for each in _acting(part)}
        # A message may end one episode and begin the next, so ends come first.
        over = [each for each in sorted(touched) if not (stages[:, each] == _ACTS).any()]
        stages[:, over] = _OUT
        self._between.update(over)
        began: set[int] = set()
        for part in parts:
            # An agent that acts between episodes begins the next one.
            acting = _acting(part)
            of_agent = stages[part.index, acting]  # [B]
            gone = of_agent == _ENDED
            if gone.any():
                raise SessionError(
                    Code.OUT_OF_ORDER,
                    f"{part.agent.at(acting[int(gone.argmax())])} acts, and has ended in this "
                    "episode: pause it until all agents that act there have ended",
                )
            if self._between:
                began.update(self._between.intersection(acting))
            stages[part.index, acting] = _ACTS
        self._between -= began
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
            self._returns[part.index, rewarded] += [part.rewards[at] for at in part.rewarded]
            self._acted[part.index, rewarded] = True
            stepped.update(rewarded)
        self._lengths[list(stepped)] += 1
        booked = self._ended(over, len(stepped), idle)
        for part in parts:  # these may belong to the next episode
            for at, reward in part.early:
                self._returns[part.index, part.environments[at]] += reward
        return booked

    def _ended(self, over: list[int], steps: int, idle: Mapping[int, float]) -> BookedBatch:
        if not over:  # most batches
            return BookedBatch(_NONE, _NONE_LONG, _NONE[:, None], steps)
        so_far = self.so_far(over)
        self._returns[:, over], self._acted[:, over], self._lengths[over] = 0, False, 0
        totals = so_far.env_returns + [idle.get(each, 0.0) for each in over]  # [L]
        return so_far._replace(env_returns=totals, steps=steps)

    def so_far(self, environments: Sequence[int]) -> BookedBatch:
        """Return results of running episodes in environments [L], without steps."""
        at = list(environments)
        returns = self._returns[:, at]  # [A, L]
        of_agents = np.where(self._acted[:, at], returns, np.nan)  # [A, L]
        return BookedBatch(returns.sum(0), self._lengths[at], of_agents.T, 0)

    # -- line-ups ---------------------------------------------------------------------------------

    def players(self, environments: Sequence[int]) -> NDArray[np.object_]:
        """Return the ids of modules [K, A] in environments [K]."""
        return self._players.of(np.array(environments, np.intp))

    def begin(self, environments: Sequence[int], evaluated: Sequence[int]) -> None:
        """Draw line-ups for new episodes in environments [K].

        Args:
            evaluated: environments among them that play for an evaluation.
        """
        assert self._line_ups is not None
        began = np.array(environments, np.intp)
        line_up = self._line_ups.begin(
            self._numbers[began], self._numbers[list(evaluated)].tolist()
        )
        ours = line_up.players.reshape(len(began), -1)[:, self._column]  # [K, A]
        slots = began[:, None] * len(self.names) + np.arange(len(self.names))  # [K, A]
        self._players.line_up(LineUp(slots.ravel(), ours.ravel()))

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
                self._add(rows, part.index, part.infos[part.rewarded, None])
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
    final_raw: list[bytes]  # bytes of each leaf of the final observations
    final_rows: list[int]  # row indices of the final observations
    infos: NDArray[np.float64] | None  # [R, K] numbers of the last step; None: no numbers
    # Rewards from before the first action in an episode, with their indices.
    early: list[tuple[int, float]]
    begin: int = 0  # index of the first row among all rows that were read together
    finals: Any = None  # [K, ...] the last observations of the K truncated rows
    actions: Sequence[Any] = ()  # bytes of each leaf of the actions so far
    # Players and versions of the weights that chose them.
    acted: list[tuple[str, Version]] = field(default_factory=list)
    due: int = 0  # shares that have no actions yet

    @property
    def rows(self) -> int:
        """Number of rows, R."""
        return len(self.environments)

    @property
    def index(self) -> int:
        """Index of the agent."""
        return self.agent.index

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
    # Actions of each part, by the index of its agent.
    answers: dict[int, bytes] = field(default_factory=dict)
    arrived: float = field(default_factory=time.perf_counter)  # seconds of `time.perf_counter`
