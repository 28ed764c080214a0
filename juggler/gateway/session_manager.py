"""Opens, resumes and closes the sessions of a gateway."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gymnasium import Space

from juggler.envrunner.info_numbers import InfoNumber, InfoNumbers, told_apart
from juggler.gateway.agent_spaces import difference, must_fit, read_space, whose
from juggler.gateway.agents import cast_agents
from juggler.gateway.answers import Answers
from juggler.gateway.gateway_stream import MESSAGE_BYTES, GatewayStream
from juggler.gateway.guest_book import GuestBook, address_of
from juggler.gateway.player import Player
from juggler.gateway.room import Load, no_room
from juggler.gateway.session_infos import SessionInfos
from juggler.gateway.sessions import (
    PROTOCOL_MAX,
    RESUME_SECONDS,
    Code,
    Session,
    SessionAgent,
    SessionError,
    Sessions,
    check_hello,
)
from juggler.gateway.shared_episodes import SharedEpisodes, keep_newest
from juggler.gateway.step_batches import Batch, Steps
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb


class Work(Protocol):
    """What a gateway acts for: it asks for samples and brings weights."""

    def prepare(
        self, module_id: str, agents: int, observation_space: Space[Any], action_space: Space[Any]
    ) -> Player:
        """Make the player of a module. Called once for each, with the spaces of the first agents
        that it acts for, and how many of them one environment has."""

    def wanted(self, module_id: str) -> int:
        """Rows of a module that may be begun now."""

    def holds_up(self, module_id: str) -> bool:
        """Whether its agents wait until their rows may begin; else they act all the same."""

    def patience(self) -> float:
        """Seconds to wait for events before `go_on` is called again."""

    def tell(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        """As `guest_book.Tell`."""

    def go_on(self) -> None:
        """Hand in complete batches, and take new weights and requests. Called after each turn."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """
    Attributes:
        max_batch: the most rows of one inference; a batch of steps of one simulator stays whole.
        max_wait: seconds that a step waits for others, to be inferred together with them.
        run_id: told to simulators.
        fragment_steps: T.
        resume_seconds: how long a session waits for a simulator that vanished.
        refuses_logged: why nobody learns from data of other policies; "": it is learned from.
        agents: by name or pattern of agents, the module that acts for them; the first that matches
            counts. {}: simulators have one agent each.
        rows: of a batch, for each agent of its module; 0: nobody is told where that is too few.
    """

    max_batch: int
    max_wait: float
    run_id: str
    fragment_steps: int
    resume_seconds: float = RESUME_SECONDS
    refuses_logged: str = ""
    agents: Mapping[str, str] = field(default_factory=dict)
    rows: int = 0


class SessionManager:
    """Opens sessions for simulators, and closes them.

    Args:
        work: what the gateway acts for.
        settings: of the gateway.
        counts: of events, by name.

    Attributes:
        sessions: all of them.
        guests: tells people of them.
        players: act for them, by module; each is made once a simulator has told its spaces.
        agents: with those spaces, by module.
        answers: write actions, by module.
        env_ended: return and length of the environments' episodes that ended, of all their agents
            together. Empty where simulators have one agent each.
    """

    def __init__(self, work: Work, settings: GatewaySettings, counts: Counter[str]) -> None:
        self._work, self._settings, self._counts = work, settings, counts
        self.sessions = Sessions(settings.resume_seconds)
        self.guests = GuestBook(self.sessions, work.tell, settings.rows)
        self.players: dict[str, Player] = {}
        self.agents: dict[str, pb.Agent] = {}
        self.answers: dict[str, Answers] = {}
        self.env_ended: list[tuple[float, int]] = []
        self._infos: dict[str, deque[InfoNumber]] = {}  # of episodes that ended
        self._load = Load()  # of all sessions

    @property
    def player(self) -> Player | None:
        """Of simulators with one agent each; None: there is none yet, or they have several."""
        return None if self._settings.agents else self.players.get(DEFAULT_MODULE)

    def hello(self, stream: GatewayStream, hello: pb.Hello) -> None:
        """Begin a session, or let it go on.

        Raises:
            SessionError: it cannot.
        """
        check_hello(hello, self._settings.agents)
        cast = cast_agents(hello, self._settings.agents)
        if hello.mode == pb.LOGGED_DATA and self._settings.refuses_logged:
            raise SessionError(Code.CANNOT_LEARN, self._settings.refuses_logged)
        resumed = bool(hello.resume_token)
        if resumed:
            session = self.sessions.resumed(hello)
            self._must_be_as_before(session, hello, cast)
            if session.stream is not None:
                text = "another stream goes on with this session"
                self.last_word(session, SessionError(Code.SUPERSEDED, text))
            session.stream = stream
        else:
            session = self._begun(stream, hello, cast)
            self.sessions.add(session)
            self._load += Load.of(session)
        stream.session, session.peer = session, address_of(stream.peer)
        self.guests.came(session, back=resumed)
        self._counts["sessions_resumed" if resumed else "sessions_begun"] += 1
        welcome = pb.Welcome(
            protocol=min(hello.protocol_max, PROTOCOL_MAX),
            run_id=self._settings.run_id,
            session_id=session.id,
            resume_token=session.token,
            resume_seconds=self.sessions.resume_seconds,
            resumed=resumed,
            last_seq=session.last_seq,
            batches_in_flight=session.batches_in_flight,
            message_bytes=MESSAGE_BYTES,
            fragment_steps=self._settings.fragment_steps,
        )
        stream.send(pb.ToSimulator(welcome=welcome).SerializeToString())

    def _begun(self, stream: GatewayStream, hello: pb.Hello, cast: list[str]) -> Session:
        """A new session, once its agents have players."""
        fresh: dict[str, tuple[pb.Agent, Space[Any], Space[Any]]] = {}
        for given, module_id in zip(hello.agents, cast, strict=True):
            if module_id not in self.agents and module_id not in fresh:
                fresh[module_id] = self._read(given, module_id)
            ours = self.agents[module_id] if module_id in self.agents else fresh[module_id][0]
            self._must_have(ours, given)
        self._make_room(hello)
        for module_id, (agent, *both) in fresh.items():
            try:
                player = self._work.prepare(module_id, cast.count(module_id), *both)
            except (WireError, UnsupportedSpace) as error:
                raise SessionError(Code.WRONG_SPACES, str(error)) from error
            self.players[module_id], self.agents[module_id] = player, agent
            self.answers[module_id] = Answers(player.action_layout, module_id)
        several = bool(self._settings.agents)
        agents = [
            SessionAgent(
                index,
                given.id if several else "",
                module_id,
                self.players[module_id].environments.seat(hello.environments),
            )
            for index, (given, module_id) in enumerate(zip(hello.agents, cast, strict=True))
        ]
        episodes = SharedEpisodes(len(agents), hello.environments) if several else None
        infos = None
        if hello.info_names:
            apart = told_apart([agent.id for agent in hello.agents]) if several else ()
            counts = len(agents), apart, hello.environments
            infos = SessionInfos(list(hello.info_names), *counts, self._infos)
        return Session(agents, hello, stream, episodes, infos)

    def _make_room(self, hello: pb.Hello) -> None:
        """Let go of sessions whose simulators have vanished, where a new one has no room beside
        them: a simulator that keeps crashing would fill the gateway with them.

        Raises:
            SessionError: those that are here leave no room for it.
        """
        more, gone = Load.of(hello), self.sessions.vanished()
        if error := no_room(more, self._load - sum(map(Load.of, gone), Load())):
            raise error
        while no_room(more, self._load):
            self.lose(gone.pop(0))

    def _read(self, given: pb.Agent, module_id: str) -> tuple[pb.Agent, Space[Any], Space[Any]]:
        """What the agents of a module have in common, as this one says it.

        Raises:
            SessionError: nobody can learn in its spaces.
        """
        observation_space = read_space(given, "observation_space")
        action_space = read_space(given, "action_space")
        try:
            must_fit(observation_space, action_space, self._settings.fragment_steps)
        except (WireError, UnsupportedSpace) as error:
            raise SessionError(Code.WRONG_SPACES, f"{whose(given)}{error}") from error
        agent = pb.Agent(
            observation_space=space_to_message(observation_space),
            action_space=space_to_message(action_space),
            policy=module_id if self._settings.agents else "",
        )
        return agent, observation_space, action_space

    def _must_be_as_before(self, session: Session, hello: pb.Hello, cast: list[str]) -> None:
        """
        Raises:
            SessionError: a session that goes on began with other agents.
        """
        for agent, given, module_id in zip(session.agents, hello.agents, cast, strict=True):
            if agent.module_id != module_id:
                text = f"{whose(given)}a session goes on with the agents that it began with"
                raise SessionError(Code.UNKNOWN_AGENT, text)
            self._must_have(self.agents[module_id], given)

    def _must_have(self, ours: pb.Agent, given: pb.Agent) -> None:
        """
        Raises:
            SessionError: an agent has other spaces than those before it.
        """
        for name in ("observation_space", "action_space"):
            our, its = getattr(ours, name), getattr(given, name)
            if our == its or space_to_message(space := read_space(given, name)) == our:
                continue
            first = "that of the run's first simulator"
            rule = "all simulators of a run must have the same"
            if ours.policy:
                first = f"that of the first agent of module {ours.policy!r}"
                rule = "all agents of a module must have the same"
            what = difference(space, read_space(ours, name), f"this {name}", first)
            raise SessionError(Code.WRONG_SPACES, f"{whose(given)}{what}: {rule}")

    def end(self, stream: GatewayStream, error: SessionError, arrivals: list[Batch]) -> None:
        """End the session of a stream that sent something wrong."""
        session = stream.session
        if session is None:
            stream.send(error.message().SerializeToString())
            stream.close()
            self._counts["hellos_refused"] += 1
            self.guests.refused(stream.peer, str(error))
        elif session.stream is stream:
            arrivals[:] = [batch for batch in arrivals if batch.session is not session]
            self.fail(session, error)

    def fail(self, session: Session, error: SessionError) -> None:
        self.last_word(session, error)
        self.close(session, f"{Code.Code.Name(error.code)}: {error}")
        self._counts["sessions_failed"] += 1

    def last_word(self, session: Session, error: SessionError) -> None:
        stream, session.stream = session.stream, None
        if stream is not None:
            stream.send(error.message().SerializeToString())
            stream.close()

    def lose(self, session: Session) -> None:
        """Close a session whose simulator did not come back."""
        self.close(session, "it did not come back")
        self._counts["sessions_lost"] += 1

    def vanish(self, session: Session) -> None:
        """Wait for a simulator whose connection broke."""
        session.vanishes()
        self.guests.vanished(session)

    def close(self, session: Session, why: str) -> None:
        """Close a session; people are told why."""
        if session.id not in self.sessions.by_id:
            return  # it sent two wrong messages at once
        places: dict[str, list[int]] = defaultdict(list)
        for agent in session.agents:
            places[agent.module_id] += agent.slots
        for module_id, of_module in places.items():
            self.players[module_id].unseat(of_module)
        if session.infos is not None:
            session.infos.settle()
        self.sessions.remove(session)
        self._load -= Load.of(session)
        session.stream = None
        self.guests.left(session, why)

    # -- what becomes of episodes -----------------------------------------------------------------

    def book(self, session: Session, parts: list[Steps], over: list[int]) -> None:
        """Account for a batch of steps.

        Args:
            session: of its simulator.
            parts: of it that were taken.
            over: the environments whose episodes are over with it.
        """
        if session.episodes is not None:
            self.env_ended += session.episodes.book(parts, over)
            keep_newest(self.env_ended)
        if session.infos is not None:
            session.infos.see(parts, over)

    def take_infos(self) -> InfoNumbers:
        """Numbers that simulators told of their steps, of the episodes that ended since the last
        call."""
        for session in self.sessions.by_id.values():
            if session.infos is not None:
                session.infos.settle()
        taken = {name: list(episodes) for name, episodes in self._infos.items()}
        self._infos.clear()
        return taken
