"""Sessions of simulators, with agents and unanswered messages."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.agent_names import MOST_AGENTS
from juggler.envrunner.info_numbers import (
    LONGEST_NAME,
    is_name,
    most_names,
    names_another,
    reported_agents,
)
from juggler.gateway.errors import Code, SessionError
from juggler.gateway.row_layout import Interface
from juggler.gateway.session_episodes import SessionInfos, SharedEpisodes
from juggler.runtime.episodes.version import Version
from juggler.runtime.nearest import one_of
from juggler.runtime.wire.v1 import simulator_pb2 as pb

PROTOCOL_MIN = PROTOCOL_MAX = 1
#: How long a session waits for a simulator that vanished.
RESUME_SECONDS = 60.0
BATCHES_IN_FLIGHT = 8
SERVED = (pb.REMOTE_INFERENCE, pb.LOCAL_INFERENCE, pb.LOGGED_DATA)


class Stream(Protocol):
    """A connection of a simulator."""

    def send(self, message: bytes) -> None:
        """Never waits."""

    def close(self) -> None:
        """End it once everything is sent."""

    @property
    def peer(self) -> str:
        """The address of its other end, as gRPC has it."""

    @property
    def dialed(self) -> str:
        """The address that its other end has dialed."""


class SessionAgent:
    """One agent of a simulator, in each of its N environments.

    Args:
        index: in the hello.
        name: its id, for people; "": the simulator has one agent.
        seats: by player that may act for it, [N] its places there.
        interface: its spaces.

    Attributes:
        interface: as given.
        seats: as given, as arrays.
        player: the first of these, all of which have the same spaces.
        places: [N] its places there.
        everyone: the numbers of the environments, in order.
        waiting: 1 for each environment, by number, where its action is due.
        acted: 1 for each environment where it has had an action in its episode.
        versions: the last weights in each environment, if its simulator acts.
    """

    def __init__(
        self, index: int, name: str, seats: Mapping[str, list[int]], interface: Interface
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
        """The player of a module; any, if that module has left."""
        if module_id in self.seats:
            return module_id
        own = (each for each in self.seats if each.startswith(f"{module_id}:"))
        return next(own, self.player)

    def at(self, environment: int) -> str:
        """For people: where something happened."""
        return f"{self.of_whom}environment {environment}"

    def asks(self, environments: list[int]) -> None:
        """The actions in these environments are due."""
        if environments is self.everyone:
            self.waiting = bytearray(self._ones)
        else:
            for environment in environments:
                self.waiting[environment] = 1

    def acts(self, environments: list[int]) -> None:
        """It has had its actions in these environments."""
        if environments is self.everyone:
            self.waiting, self.acted = bytearray(len(self._ones)), bytearray(self._ones)
        else:
            for environment in environments:
                self.waiting[environment], self.acted[environment] = 0, 1


class Session:
    """One simulator.

    Args:
        agents: that act in each of its environments.
        hello: its first message.
        stream: its connection.
        episodes: of its environments, with their players; None: it has one agent.
        infos: numbers of its steps; None: it tells none.

    Attributes:
        hello: as given.
        id: for people.
        token: that its simulator shows to go on with it.
        mode: whether the gateway acts.
        environments: N.
        info_names: of the K numbers of a step.
        batches_in_flight: the most batches of steps, or recordings, without an answer.
        has_policy: the version of the policy that it got last; None: it has asked for none.
        wants_news: it is to be told of the next version.
        real_time: its environments do not wait for actions.
        last_seq: the highest that has arrived.
        stream: its connection; None: its simulator has vanished.
        peer: the address of its simulator, for people; set by the manager.
        dialed: the address that its simulator has dialed; set by the manager.
        seed: of its episodes; set by the manager.
        parameters: that its simulator has, by name; None: they are unknown.
        lost_at: when it vanished, in seconds of `time.monotonic`.
        told_to_wait: it knows that no samples are requested.
        told_of_untold: it knows that episodes are not counted.
    """

    def __init__(
        self,
        agents: list[SessionAgent],
        hello: pb.Hello,
        stream: Stream,
        episodes: SharedEpisodes | None = None,
        infos: SessionInfos | None = None,
    ) -> None:
        self.hello = hello
        self.id = secrets.token_hex(6)
        self.token = secrets.token_hex(16)
        self.agents, self.episodes, self.infos = agents, episodes, infos
        self.info_names = list(hello.info_names)
        self.mode = hello.mode
        self.environments = hello.environments
        remote = hello.mode == pb.REMOTE_INFERENCE
        # Episodes end at any time, so there may be many recordings of one environment.
        self.batches_in_flight = BATCHES_IN_FLIGHT * (1 if remote else hello.environments)
        self.has_policy: Version | None = None
        self.wants_news = False
        self.real_time = hello.real_time
        self.last_seq = 0
        self.stream: Stream | None = stream
        self.peer = self.dialed = ""
        self.seed = 0
        self.parameters: Mapping[str, float] | None = None
        self.lost_at = 0.0
        self.told_to_wait = self.told_of_untold = False
        self._unanswered: set[int] = set()
        self._answers: OrderedDict[int, bytes] = OrderedDict()

    def must_be(self, *modes: pb.Mode) -> None:
        """
        Raises:
            SessionError: a message is not for the mode of this session.
        """
        if self.mode not in modes:
            names = one_of(pb.Mode.Name(mode) for mode in modes)
            text = f"a message of the mode {names}: this session is {pb.Mode.Name(self.mode)}"
            raise SessionError(Code.WRONG_MODE, text)

    def repeats(self, seq: int) -> bool:
        """Note that a batch has come -> whether it came before.

        If it has an answer, that is sent again.

        Raises:
            SessionError: it came before its turn, or too late.
        """
        if seq == self.last_seq + 1:
            if len(self._unanswered) >= self.batches_in_flight:
                text = f"{len(self._unanswered)} batches have no answer yet: wait for one"
                raise SessionError(Code.TOO_MANY_IN_FLIGHT, text, seq)
            self.last_seq = seq
            self._unanswered.add(seq)
            return False
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
        """The agent of a session that has one."""
        (agent,) = self.agents
        return agent

    def vanishes(self) -> None:
        self.stream, self.lost_at = None, time.monotonic()


class Sessions:
    """All sessions.

    Args:
        resume_seconds: how long one waits for a simulator that vanished.

    Attributes:
        by_id: the open ones, whether or not their simulators are connected.
        resume_seconds: as given.
    """

    def __init__(self, resume_seconds: float) -> None:
        self.by_id: dict[str, Session] = {}
        self.resume_seconds = resume_seconds
        self._by_token: dict[str, Session] = {}

    def add(self, session: Session) -> None:
        self.by_id[session.id] = session
        self._by_token[session.token] = session

    def remove(self, session: Session) -> None:
        self.by_id.pop(session.id, None)
        self._by_token.pop(session.token, None)

    def resumed(self, hello: pb.Hello) -> Session:
        """Return the open session that a hello resumes.

        Raises:
            SessionError: no open session has the token, or it began with another hello.
        """
        session = self._by_token.get(hello.resume_token)
        if session is None:
            raise SessionError(
                Code.UNKNOWN_SESSION,
                "the resume token belongs to no session: it was closed, waited for more than "
                f"{self.resume_seconds:.0f} s, or was another gateway's that was here before. "
                "Begin a new one without a token",
                retryable=True,
            )
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
        """How many have a simulator that gets its actions here."""
        return sum(
            each.mode == pb.REMOTE_INFERENCE and each.stream is not None
            for each in self.by_id.values()
        )

    def vanished(self) -> list[Session]:
        """Sessions that wait for their simulators, the longest first."""
        waiting = [each for each in self.by_id.values() if each.stream is None]
        return sorted(waiting, key=lambda each: each.lost_at)

    def overdue(self) -> list[Session]:
        """Sessions that have waited for their simulators long enough."""
        since = time.monotonic() - self.resume_seconds
        return [each for each in self.vanished() if each.lost_at < since]


def check_hello(hello: pb.Hello, known: Collection[str]) -> None:
    """Check what does not depend on the run's spaces.

    Args:
        hello: of a new session, or of one that resumes.
        known: names of agents that the run has, in this session or in another one.

    Raises:
        SessionError: it cannot take part.
    """
    if not hello.protocol_min <= PROTOCOL_MAX or not hello.protocol_max >= PROTOCOL_MIN:
        raise SessionError(
            Code.UNSUPPORTED_VERSION,
            f"this gateway speaks version {PROTOCOL_MIN} to {PROTOCOL_MAX} of the protocol, the "
            f"simulator {hello.protocol_min} to {hello.protocol_max}, as protocol_min and "
            "protocol_max of its hello say: set both, or use one version of Juggler on both sides",
        )
    if hello.mode not in SERVED:
        served = ", ".join(pb.Mode.Name(mode) for mode in SERVED)
        raise SessionError(Code.NOT_SERVED, f"mode {hello.mode} is not served here: use {served}")
    if not 1 <= len(hello.agents) <= MOST_AGENTS:
        text = f"{len(hello.agents)} agents in one session: have 1 to {MOST_AGENTS}"
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
    for at, name in enumerate(names):
        if not is_name(name) or name in names[:at]:
            text = f"the name {name[:20]!r} among info_names: give each number one of its own, of"
            raise SessionError(Code.NOT_SERVED, f"{text} 1 to {LONGEST_NAME} printable characters")
        if names_another(name, apart, (*agents, *known)):
            text = (
                f"with {name!r} among info_names, a number would have the name of another agent's"
            )
            raise SessionError(Code.NOT_SERVED, f"{text}: rename it")
