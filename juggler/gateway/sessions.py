"""Sessions of simulators, with their agents and unanswered messages."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

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
from juggler.gateway.row_layout import AgentInterface
from juggler.gateway.session_episodes import SessionInfos, SharedEpisodes
from juggler.gateway.session_errors import Code, SessionError
from juggler.runtime.episodes.version import Version
from juggler.runtime.near_matches import one_of
from juggler.runtime.wire.v1 import simulator_pb2 as pb

if TYPE_CHECKING:
    from juggler.gateway.transport import GatewayStream

PROTOCOL_MIN = PROTOCOL_MAX = 1
#: How long a session waits for a simulator that vanished.
RESUME_SECONDS = 60.0
BATCHES_IN_FLIGHT = 8
#: A notice, which a simulator gets once until its next answer.
WAITING = "no samples are requested now; answers come as soon as they are"
SERVED = (pb.REMOTE_INFERENCE, pb.LOCAL_INFERENCE, pb.LOGGED_DATA)


class SessionAgent:
    """One agent of a simulator, in each of its N environments.

    Args:
        index: its index in the hello.
        name: its id; "": the simulator has one agent.
        seats: [N] its places in each player that may act for it, by player.
        interface: its spaces.

    Attributes:
        interface: as given.
        seats: as given, as arrays.
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
        agents: agents in each of its environments.
        hello: its first message.
        stream: its connection.
        episodes: episodes of its environments, with their players; None: it has one agent.
        infos: numbers of its steps; None: no numbers.

    Attributes:
        hello: as given.
        id: id for logs.
        token: token with which its simulator resumes it.
        mode: whether the gateway acts.
        environments: N.
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
        notices: notices that it got, `WAITING` since its last answer.
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
        self.notices: set[str] = set()
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
        resume_seconds: as given.
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
        hello: of a new or a resumed session.
        known: names of the run's agents, in this session or in another one.

    Raises:
        SessionError: the hello is refused.
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
