"""Opens, resumes, closes and logs the sessions of a gateway."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.envrunner.agent_returns import add_returns, has_metrics_by_agent
from juggler.envrunner.info_numbers import (
    LONGEST_NAME,
    InfoNumber,
    is_name,
    most_names,
    names_another,
    reported_agents,
)
from juggler.envrunner.multi_agent.line_up import LineUpError
from juggler.envrunner.rounds import PlayedRound
from juggler.gateway.agents import ModuleAssignment, module_of
from juggler.gateway.curriculum import Curriculum
from juggler.gateway.module_player import TRAINING, ModulePlayer
from juggler.gateway.session_errors import Code, SessionError
from juggler.gateway.sessions import (
    RESUME_SECONDS,
    AgentInterface,
    AgentSteps,
    BookedBatch,
    GatewaySession,
    SessionAgent,
    SessionInfos,
    Sessions,
    SharedEpisodes,
    StepMessage,
    forget_oldest,
)
from juggler.gateway.simulator_evaluation import Evaluations
from juggler.gateway.step_batches import PlayerRows, split, whole
from juggler.gateway.transport import MESSAGE_BYTES, GatewayStream
from juggler.runtime.actors.hub import one_line
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.near_matches import listed
from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.spaces import space_from_message, space_to_message
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.trees import path_name
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_SPACES = "observation_space", "action_space"  # fields of a pb.Agent


class GatewayWork(Protocol):
    """The part of a worker that requests samples and provides weights."""

    def prepare(self, key: str, agents: int, interface: AgentInterface) -> ModulePlayer:
        """Make the player of a key: see `ModuleAssignment`.

        Called once per key, with the number of agents that it may act for in one environment, and
        their interface.
        """

    def wanted(self, key: str) -> int | None:
        """Return the number of rows that a player may begin now.

        None: its agents do not wait for rows, and play without them.
        """

    def report_line(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        """Report a text and the numbers of connected simulators and environments."""

    def after_turn(self) -> None:
        """Hand in batches, load weights and start requests, after each turn."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of a gateway."""

    max_batch: int  # maximum rows of one inference; a batch of steps of one simulator stays whole
    max_wait: float  # seconds that a step waits for other steps, for a common inference
    run_id: str
    fragment_steps: int  # T
    resume_seconds: float = RESUME_SECONDS  # how long a session waits for a simulator that vanished
    refuses_logged: str = ""  # why data of other policies is refused; "": it is accepted
    casting: ModuleAssignment = field(default_factory=ModuleAssignment)
    rows: int = 0  # rows of a batch, for each agent of its module; 0: do not report too few rows
    curriculum: Curriculum = field(default_factory=Curriculum)
    evaluates: bool = False


class SessionManager:
    """Opens sessions for simulators, and closes them."""

    def __init__(self, work: GatewayWork, settings: GatewaySettings, counts: Counter[str]) -> None:
        self._work, self._settings, self._counts = work, settings, counts
        self._casting = settings.casting
        self.sessions = Sessions(settings.resume_seconds)
        guests = ConnectionLog(self.sessions, work.report_line, settings.rows, settings.evaluates)
        self.guests = guests
        # Players by key, each made when a simulator has reported its spaces.
        self.players: dict[str, ModulePlayer] = {}
        self.evaluations = Evaluations(self.players, self.sessions.by_id)
        # Of environments' episodes since the last report. Without returns if simulators have one
        # agent each, and without returns by agent if these are many.
        self._played = PlayedRound({}, {})
        self.env_steps = 0  # steps of these environments so far
        self._names = dict.fromkeys(settings.casting.table)  # of all agents, and patterns
        self._infos: dict[str, deque[InfoNumber]] = {}  # of episodes that ended
        self._load = load_of()  # of all sessions

    @property
    def player(self) -> ModulePlayer | None:
        """The player of simulators with one agent, once it exists."""
        return None if self._casting.table else self.players.get(DEFAULT_MODULE)

    def hello(self, stream: GatewayStream, hello: pb.Hello) -> None:
        """Begin or resume a session.

        Raises:
            SessionError: the hello is refused.
        """
        check_hello(hello, self._casting.table)
        cast = self._casting.cast(hello)
        if hello.mode == pb.LOGGED_DATA and self._settings.refuses_logged:
            raise SessionError(Code.CANNOT_LEARN, self._settings.refuses_logged)
        resumed = bool(hello.resume_token)
        # A resumed session keeps its places, rows and unread answers.
        if resumed:
            session = self.sessions.resumed(hello)
            for agent, given in zip(session.agents, hello.agents, strict=True):
                self._must_have(agent.player, agent.interface, given)
            if session.stream is not None:
                text = "another stream goes on with this session"
                self.send_error(session, SessionError(Code.SUPERSEDED, text))
            session.resumes(stream)
        else:
            session = self._begun(stream, hello, cast)
            session.seed = self._settings.curriculum.session_seed(stream.dialed)
            self.sessions.by_id[session.id] = session
            self._load += load_of(session.hello)
        # The session is complete: its stream may use it now.
        stream.session, session.peer = session, address_of(stream.peer)
        session.dialed = stream.dialed
        self.guests.connected(session, back=resumed)
        self._counts["sessions_resumed" if resumed else "sessions_begun"] += 1
        # With token and last number, a simulator can continue after a break.
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
            seed=session.seed,
            parameters=self._settings.curriculum.parameters,
        )
        # Answers from before a break may follow this message, with older parameters.
        session.parameters = None if resumed else self._settings.curriculum.parameters
        stream.send(pb.ToSimulator(welcome=welcome).SerializeToString())

    def _begun(
        self, stream: GatewayStream, hello: pb.Hello, cast: list[tuple[str, ...]]
    ) -> GatewaySession:
        """Return a new session, whose agents have players."""
        fresh: dict[str, AgentInterface] = {}
        for given, players in zip(hello.agents, cast, strict=True):
            for key in players:
                if key in self.players:
                    self._must_have(key, self.players[key].interface, given)
                elif key in fresh:
                    self._must_have(key, fresh[key], given)
                else:
                    fresh[key] = self._read(given)
        # Nothing above keeps anything, so a refused hello leaves no trace.
        self._make_room(hello)
        for key, interface in fresh.items():
            try:
                self._prepare(key, sum(key in players for players in cast), interface)
            except (WireError, UnsupportedSpace) as error:
                raise SessionError(Code.WRONG_SPACES, str(error)) from error
        several = bool(self._casting.table)
        # A place in each player, because another module may act in the next episode.
        agents = [
            SessionAgent(
                index,
                given.id if several else "",
                {key: self.players[key].seat(hello.environments) for key in players},
                self.players[players[0]].interface,
            )
            for index, (given, players) in enumerate(zip(hello.agents, cast, strict=True))
        ]
        # The player of a single agent counts its episodes.
        episodes = infos = None
        names = [agent.id for agent in hello.agents]
        if several:
            episodes = self._casting.episodes(names, cast, hello.environments)
            if has_metrics_by_agent(self._names):
                self._names.update(dict.fromkeys(names))
        if hello.info_names:
            apart = reported_agents(names) if several else ()
            counts = len(agents), apart, hello.environments
            infos = SessionInfos(list(hello.info_names), *counts, self._infos)
        return GatewaySession(agents, hello, stream, episodes, infos)

    def _prepare(self, key: str, count: int, interface: AgentInterface) -> None:
        known = (player.interface for player in self.players.values())
        alike = (each for each in known if each.messages == interface.messages)
        interface = next(alike, interface)  # equal spaces share one
        self.players[key] = self._work.prepare(key, count, interface)

    def add_player(self, module_id: str) -> None:
        """Add a player to a league."""
        if not self.players:
            return  # no simulator has reported its spaces
        # All agents of a league have equal spaces.
        interface = next(iter(self.players.values())).interface
        self._prepare(module_id, len(self._casting.table), interface)
        for session in self.sessions.by_id.values():
            for each in session.agents:
                places = self.players[module_id].seat(session.environments)
                each.seats[module_id] = np.array(places, np.intp)

    def remove_player(self, module_id: str) -> None:
        """Remove a league's player that no running episode has."""
        for session in self.sessions.by_id.values():
            for each in session.agents:
                each.seats.pop(module_id, None)
        if module_id in self.players:
            self._counts.update(self.players[module_id].counts)
            del self.players[module_id]

    def _make_room(self, hello: pb.Hello) -> None:
        """Close sessions of vanished simulators to make room for a new one.

        Otherwise a simulator that keeps crashing would fill the gateway.
        """
        more, gone = load_of(hello), self.sessions.vanished()
        if error := no_room(more, self._load - load_of(*(each.hello for each in gone))):
            raise error
        while no_room(more, self._load):
            self.lose(gone.pop(0))

    def _read(self, given: pb.Agent) -> AgentInterface:
        """Read the spaces that all agents of a player have."""
        observed, acted = (read_space(given, name) for name in _SPACES)
        try:
            return fitting(observed, acted, self._settings.fragment_steps)
        except ValueError as error:
            raise SessionError(Code.WRONG_SPACES, f"{whose(given)}{error}") from error

    def _must_have(self, key: str, interface: AgentInterface, given: pb.Agent) -> None:
        """Check that an agent has the spaces of a player's earlier agents."""
        for name, our, ours in zip(_SPACES, interface.messages, interface.spaces, strict=True):
            if our == getattr(given, name):
                continue
            if space_to_message(space := read_space(given, name)) == our:
                continue
            first = "that of the run's first simulator"
            rule = "all simulators of a run must have the same"
            if self._casting.table:
                first = f"that of the first agent of module {module_of(key)!r}"
                rule = "all agents of a module must have the same"
            what = difference(space, ours, f"this {name}", first)
            raise SessionError(Code.WRONG_SPACES, f"{whose(given)}{what}: {rule}")

    def end(self, stream: GatewayStream, error: SessionError, arrivals: list[StepMessage]) -> None:
        """End the session of a stream that sent a wrong message."""
        session = stream.session
        if session is None:
            stream.send(error.message().SerializeToString())
            stream.close()
            self._counts["hellos_refused"] += 1
            self.guests.refused(stream.peer, error.with_code)
        elif session.stream is stream:
            arrivals[:] = [batch for batch in arrivals if batch.session is not session]
            self.fail(session, error)

    def fail(self, session: GatewaySession, error: SessionError) -> None:
        self.send_error(session, error)
        self.close(session, error.with_code, failed=True)
        self._counts["sessions_failed"] += 1

    def send_error(self, session: GatewaySession, error: SessionError) -> None:
        stream, session.stream = session.stream, None
        if stream is not None:
            stream.send(error.message().SerializeToString())
            stream.close()

    def lose(self, session: GatewaySession) -> None:
        """Close a session whose simulator did not come back."""
        self.close(session, "it did not come back")
        self._counts["sessions_lost"] += 1

    def vanish(self, session: GatewaySession) -> None:
        """Wait for a simulator whose connection broke."""
        session.vanishes()
        self.guests.vanished(session)

    def close(self, session: GatewaySession, why: str, *, failed: bool = False) -> None:
        """Close a session, and log the reason.

        It is a warning if the session `failed`.
        """
        if session.id not in self.sessions.by_id:
            return  # it sent two wrong messages at once
        self.evaluations.leave(session)
        places: dict[str, list[int]] = defaultdict(list)
        for agent in session.agents:
            for key, of_agent in agent.seats.items():
                places[key] += of_agent.tolist()
        for key, of_player in places.items():
            self.players[key].unseat(of_player)
        if session.episodes is not None:
            session.episodes.leave()
        del self.sessions.by_id[session.id]
        self._load -= load_of(session.hello)
        session.stream = None
        self.guests.left(session, why, failed=failed)

    # -- episodes ---------------------------------------------------------------------------------

    def shares(self, batch: StepMessage) -> list[PlayerRows]:
        """Book a batch of steps, and split its rows among players.

        Raises:
            SessionError: an episode gets no line-up.
        """
        episodes = batch.session.episodes
        drawn = episodes is not None and episodes.drawn
        # The reward belongs to the old line-up, the next action to the new one.
        before = [self._players_of(part) for part in batch.parts] if drawn else []
        self._book(batch)
        chosen = self.evaluations.choose(batch)
        try:
            if episodes is not None and drawn and batch.began:
                episodes.begin(batch.began, chosen)
        except LineUpError as error:
            raise SessionError(Code.NOT_SERVED, str(error), batch.seq) from error
        self.evaluations.begin_episodes(batch, chosen)
        if not drawn:
            return [whole(part, part.agent.player) for part in batch.parts]
        after = [self._players_of(part) for part in batch.parts] if batch.began else before
        parts = zip(batch.parts, before, after, strict=True)
        return [share for part, *players in parts for share in split(part, *players)]

    def _players_of(self, part: AgentSteps) -> list[str]:
        """Return the player [R] that acts in each row now."""
        episodes = part.batch.session.episodes
        assert episodes is not None
        ids = episodes.players(part.environments)[:, part.agent.index]
        return [part.agent.player_of(each) for each in ids.tolist()]

    def _book(self, batch: StepMessage) -> None:
        """Add the returns, lengths and numbers of a batch of steps."""
        session, over, episodes = batch.session, batch.over, batch.session.episodes
        booked = None if episodes is None else episodes.book(batch.parts, over, batch.idle)
        trained: Any = slice(None)  # of the ended episodes
        if self.evaluations.began:
            trained = self.evaluations.book(batch, booked)
        if episodes is not None and booked is not None:
            self.env_steps += booked.steps
            if over:
                self._add_ended(episodes, booked, trained)
                episodes.report_ended(over, booked)
        if session.infos is not None:
            # Evaluations do not count in training.
            if self.evaluations.began:
                playing = self.evaluations.playing(session)  # [N]
                for part in batch.parts:
                    here = part.environments
                    part.rewarded = [at for at in part.rewarded if playing[here[at]] == TRAINING]
            session.infos.see(batch.parts, over)

    def _add_ended(self, episodes: SharedEpisodes, booked: BookedBatch, trained: Any) -> None:
        """Add ended episodes to the results of training."""
        played = self._played
        played.env_returns.extend(booked.env_returns[trained].tolist())
        played.env_lengths.extend(booked.env_lengths[trained].tolist())
        if has_metrics_by_agent(self._names):
            add_returns(played.agent_returns, episodes.names, booked.agent_returns[trained])
        else:
            played.agent_returns.clear()
        forget_oldest(played.env_returns)
        forget_oldest(played.env_lengths)
        for of_agent in played.agent_returns.values():
            forget_oldest(of_agent)

    def pop_played(self) -> PlayedRound:
        """Return results of environments' episodes since the last call."""
        played, self._played = self._played, PlayedRound({}, {})
        played.infos.update({name: list(episodes) for name, episodes in self._infos.items()})
        self._infos.clear()
        return played


PROTOCOL_MIN = PROTOCOL_MAX = 1
_MOST_AGENTS = 64  # of one environment
SERVED = (pb.REMOTE_INFERENCE, pb.LOCAL_INFERENCE, pb.LOGGED_DATA)


def check_hello(hello: pb.Hello, known: Collection[str]) -> None:
    """Check the parts of a hello other than spaces.

    Args:
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


_MOST_ROW_BYTES = 256 << 20
#: Maximum numbers in an observation or an action, with choices encoded one-hot.
_MOST_NUMBERS = 1 << 22


def fitting(observation_space: Space[Any], action_space: Space[Any], steps: int) -> AgentInterface:
    """Return the interface of spaces, if their rows fit the memory.

    Raises:
        SessionError: the spaces are too large.
        ValueError: masks do not fit the actions.
    """
    for name, space in (("observation", observation_space), ("action", action_space)):
        if (numbers := _numbers(space)) > _MOST_NUMBERS:
            text = f"an {name} is {numbers} numbers, with one for each value of what is counted"
            raise SessionError(Code.WRONG_SPACES, f"{text}: at most {_MOST_NUMBERS}")
    interface = AgentInterface(observation_space, action_space)
    row_bytes = steps * sum(leaf.row_bytes for leaf in interface.observations.leaves)
    if row_bytes > _MOST_ROW_BYTES:
        text = f"{steps} observations take {row_bytes} bytes: at most {_MOST_ROW_BYTES}"
        raise SessionError(Code.WRONG_SPACES, text)
    return interface


def read_space(agent: pb.Agent, name: str) -> Space[Any]:
    """Read a space of an agent.

    Raises:
        SessionError: it is not a valid space.
    """
    try:
        return space_from_message(getattr(agent, name))
    except (WireError, UnsupportedSpace) as error:
        raise SessionError(Code.WRONG_SPACES, f"{whose(agent)}{name}: {error}") from error


def difference(one: Space[Any], other: Space[Any], its_name: str, other_name: str) -> str:
    """Describe how two spaces differ."""
    its, others = (dict(space_leaves(space)) for space in (one, other))
    if [*its] == [*others]:
        for path, part in its.items():
            if space_to_message(part) != space_to_message(others[path]):
                one, other, at = part, others[path], "".join(f" at {key!r}" for key in path)
                its_name, other_name = its_name + at, other_name + at
                break
    elif () not in {*its, *others}:
        mine, theirs = (", ".join(map(path_name, each))[:200] for each in (its, others))
        return f"{its_name} has the parts {mine}; {other_name} has {theirs}"
    # Gymnasium's texts may be equal although bounds or dtypes differ.
    # NumPy abbreviates long arrays; the text of a protobuf message does not.
    text, other_text = (one_line(str(space), 200) for space in (one, other))
    if text == other_text and isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        where = np.argwhere((one.low != other.low) | (one.high != other.high))
        for place in [tuple(each) for each in where.tolist()][:1]:
            text += f" with bounds of {one.low[place]} and {one.high[place]} at {list(place)}"
            other_text += f" with {other.low[place]} and {other.high[place]} there"
    elif text == other_text:
        text, other_text = f"{text} of {one.dtype}", f"{text} of {other.dtype}"
    return f"{its_name} is {text}; {other_name} is {other_text}"


def _numbers(space: Space[Any]) -> int:
    """Count the numbers of a space, with choices encoded one-hot."""
    numbers = 0
    for _, leaf in space_leaves(space):
        if isinstance(leaf, spaces.Discrete):
            numbers += int(leaf.n)
        elif isinstance(leaf, spaces.MultiDiscrete):
            numbers += int(leaf.nvec.sum(dtype=object))  # of any size
        else:
            numbers += math.prod(leaf.shape or ())
    return numbers


def whose(agent: pb.Agent) -> str:
    """Return the beginning of an error about an agent."""
    return f"agent {agent.id!r}: " if agent.id else ""


MOST_SESSIONS = 4096
MOST_ENVIRONMENTS = 1 << 16  # counted once per agent
#: Maximum infos of one step of all sessions. Each takes 32 bytes, so 8 MB in all.
MOST_NUMBERS = 1 << 18


def load_of(*hellos: pb.Hello) -> NDArray[np.int64]:
    """Return the load [3] of sessions, as `no_room` counts it."""
    load = np.zeros(3, np.int64)
    for each in hellos:
        environments = each.environments * len(each.agents)
        load += 1, environments, environments * len(each.info_names)
    return load


def no_room(more: NDArray[np.int64], here: NDArray[np.int64]) -> SessionError | None:
    """Return the error of a new session without room, or None.

    Args:
        more: [3] load of the new session: sessions; their environments, once per agent; infos of
            one step of all these environments.
        here: [3] load of the other sessions.
    """
    most = MOST_SESSIONS, MOST_ENVIRONMENTS, MOST_NUMBERS
    sessions, environments, numbers = (here + more > most).tolist()  # what is too much
    retryable = True
    # Waiting does not help a session that is too large by itself.
    if more[1] > MOST_ENVIRONMENTS:
        text = f"{more[1]} environments in one session, once for each agent: have at most "
        text += f"{MOST_ENVIRONMENTS}"
        retryable = False
    elif sessions or environments:
        text = (
            f"{here[0]} sessions with {here[1]} environments are here, and at most {MOST_SESSIONS} "
            f"with {MOST_ENVIRONMENTS}, once for each agent, may be: start another gateway"
        )
    # Infos have a limit of their own, because their names come from the simulator.
    elif numbers:
        text = (
            f"its info_names are {more[2]} numbers for each step of all environments and agents, "
            f"{here[2]} of other sessions are here, and at most {MOST_NUMBERS} may be: name fewer, "
            "or start another gateway"
        )
    else:
        return None
    return SessionError(Code.FULL, text, retryable=retryable)


#: Within this time, further lines of one kind are only counted.
_SECONDS = 60.0
_WARNINGS = {"refused", "failed"}  # kinds of lines about mistakes of simulators
_MOST_LINES = {"refused": 1}  # in this time, by kind
_MOST = 10  # lines of other kinds
_LONGEST = 400  # characters of a reason


class ConnectionLog:
    """Logs simulators that connect and leave, in few lines.

    Args:
        rows: maximum number of environments that fit a batch; 0: no maximum.
    """

    def __init__(
        self,
        sessions: Sessions,
        report_line: Callable[[str, bool, int, int], None],
        rows: int = 0,
        evaluates: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions, self._report_line = sessions, report_line
        self._rows, self._evaluates, self._clock = rows, evaluates, clock
        self.why: dict[str, str] = {}  # the newest reason, by kind of line
        # By kind of line: since when it is counted, in seconds, the count, and the newest line.
        self._of: dict[str, tuple[float, int, str]] = {}

    def connected(self, session: GatewaySession, *, back: bool) -> None:
        """Log a simulator that began a session, or is `back` in it."""
        modules = dict.fromkeys(module_of(each) for agent in session.agents for each in agent.seats)
        plural = "" if session.environments == 1 else "s"
        what = f"{session.environments:,} environment{plural} for "
        what += _few("policy", "policies", modules)
        if names := [agent.name for agent in session.agents if agent.name]:
            what += f", {_few('agent', 'agents', names)}"
        self._line(
            "came", f"{'has again' if back else 'has'} the simulator at {session.peer}", what
        )
        # Rows beyond one batch wait for the next one, and may become too old.
        _, environments = self.here()
        if 0 < (rows := self._rows) < environments:
            self._rows = 0  # one warning
            self._report(
                f"has simulators with {environments:,} environments, and a batch has "
                f"envs_per_runner = {rows:,} rows for each agent: the others wait meanwhile, "
                "or become too old. Let envs_per_runner be the number of all environments",
                True,
            )
        # Known at once, and not only after the first evaluation has waited for a simulator.
        if self._evaluates and not self._sessions.asking:
            self._evaluates = False  # one warning
            mode = pb.Mode.Name(session.mode)
            self._report(
                f"evaluation_seconds: in the mode {mode} of the simulator at {session.peer}, the "
                "gateway does not act, so no evaluation can play its episodes: connect a simulator "
                "with the mode REMOTE_INFERENCE, too, or set evaluation_seconds = 0",
                True,
            )

    def vanished(self, session: GatewaySession) -> None:
        """Log a broken connection of a simulator."""
        waits = f"waits {self._sessions.resume_seconds:.0f} s for it"
        self._line("vanished", f"lost the connection of the simulator at {session.peer}", waits)

    def left(self, session: GatewaySession, why: str, *, failed: bool) -> None:
        """Log the end of a session."""
        kind = "failed" if failed else "left"
        self._line(kind, f"no longer has the simulator at {session.peer}", why)

    def refused(self, peer: str, why: str) -> None:
        """Log a refused simulator."""
        self._line("refused", f"refused a simulator at {address_of(peer)}", why)

    def report_omitted(self) -> None:
        """Report the number of omitted lines, if it is time."""
        now = self._clock()
        for kind, (began, count, last) in [*self._of.items()]:
            if now - began < _SECONDS:
                continue
            del self._of[kind]
            if (omitted := count - _MOST_LINES.get(kind, _MOST)) > 0:
                self._of[kind] = now, 1, last
                if omitted > 1:
                    last += f" ({omitted:,} times in the last {_SECONDS:.0f} s; "
                    last += "this is the last one)"
                self._report(last, kind in _WARNINGS)

    def _line(self, kind: str, what: str, why: str) -> None:
        self.report_omitted()
        self.why[kind] = why
        text = f"{what}: {one_line(why, _LONGEST)}"
        began, count, _ = self._of.get(kind, (self._clock(), 0, ""))
        self._of[kind] = began, count + 1, text
        if count < _MOST_LINES.get(kind, _MOST):
            self._report(text, kind in _WARNINGS)

    def _report(self, text: str, warning: bool) -> None:
        simulators, environments = self.here()
        self._report_line(text, warning, simulators, environments)

    def here(self) -> tuple[int, int]:
        """Return the number of connected simulators and of their environments."""
        here = [each for each in self._sessions.by_id.values() if each.stream is not None]
        return len(here), sum(each.environments for each in here)


def address_of(peer: str) -> str:
    """Return the address of a stream's other end, for messages."""
    kind, _, address = peer.partition(":")
    # gRPC leaves out the path of a Unix socket.
    return unquote(address) or ("a Unix socket" if kind == "unix" else "an unknown address")


def _few(singular: str, plural: str, names: Iterable[str]) -> str:
    shown = [name[:64] for name in names]
    return f"{singular if len(shown) == 1 else plural} {listed(shown, ', '.join)}"
