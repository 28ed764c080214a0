"""Open, resume and close the sessions of a gateway."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.envrunner.agent_returns import AgentReturns, add_returns, has_metrics_by_agent
from juggler.envrunner.info_numbers import InfoNumber, reported_agents
from juggler.envrunner.multi_agent.line_up import LineUpError
from juggler.envrunner.rounds import PlayedRound
from juggler.gateway.agents import Casting, module_of
from juggler.gateway.curriculum import Curriculum
from juggler.gateway.errors import Code, SessionError
from juggler.gateway.evaluation import TRAINING
from juggler.gateway.guest_book import GuestBook, address_of
from juggler.gateway.player import Player
from juggler.gateway.row_layout import Interface
from juggler.gateway.session_episodes import SessionInfos, forget_oldest
from juggler.gateway.sessions import (
    PROTOCOL_MAX,
    RESUME_SECONDS,
    Session,
    SessionAgent,
    Sessions,
    check_hello,
)
from juggler.gateway.step_batches import Answers, Batch, Share, Steps, split, whole
from juggler.gateway.transport import MESSAGE_BYTES, GatewayStream
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.spaces import space_from_message, space_to_message
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.v1 import simulator_pb2 as pb

#: Why a session was closed, if its simulator stayed away.
LOST = "it did not come back"


class Work(Protocol):
    """What a gateway acts for: it asks for samples and brings weights."""

    def prepare(
        self, key: str, agents: int, observation_space: Space[Any], action_space: Space[Any]
    ) -> Player:
        """Make a player, by its key: see `Casting`.

        Called once for each, with the spaces of the first agents that it may act for, and how many
        of them one environment has.
        """

    def wanted(self, key: str) -> int:
        """Rows of a player that may be begun now."""

    def holds_up(self, key: str) -> bool:
        """Whether its agents wait until their rows may begin."""

    def patience(self) -> float:
        """Seconds to wait for events before `go_on` is called again."""

    def tell(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        """As `guest_book.Tell`."""

    def go_on(self) -> None:
        """Hand in batches, and take weights and requests, after each turn."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of a gateway.

    Attributes:
        max_batch: the most rows of one inference; a batch of steps of one simulator stays whole.
        max_wait: seconds that a step waits for others, to be inferred together with them.
        run_id: told to simulators.
        fragment_steps: T.
        resume_seconds: how long a session waits for a simulator that vanished.
        refuses_logged: why data of other policies is not learned from; "": it is learned from.
        casting: which modules may act for which agents.
        rows: of a batch, for each agent of its module; 0: too few of them are not reported.
        curriculum: of the episodes.
    """

    max_batch: int
    max_wait: float
    run_id: str
    fragment_steps: int
    resume_seconds: float = RESUME_SECONDS
    refuses_logged: str = ""
    casting: Casting = field(default_factory=Casting)
    rows: int = 0
    curriculum: Curriculum = field(default_factory=Curriculum)


class SessionManager:
    """Opens sessions for simulators, and closes them.

    Args:
        work: what the gateway acts for.
        settings: of the gateway.
        counts: of events, by name.

    Attributes:
        sessions: all of them.
        guests: tells people of them.
        players: act for them; each is made once a simulator has told its spaces.
        agents: with those spaces, by player.
        interfaces: of those spaces, by player; equal ones are the same.
        answers: write actions, by player.
        env_ended: return and length of the environments' episodes that ended, of all their agents
            together. Empty where simulators have one agent each.
        env_steps: of these environments so far.
    """

    def __init__(self, work: Work, settings: GatewaySettings, counts: Counter[str]) -> None:
        self._work, self._settings, self._counts = work, settings, counts
        self._casting = settings.casting
        self.sessions = Sessions(settings.resume_seconds)
        self.guests = GuestBook(self.sessions, work.tell, settings.rows)
        self.players: dict[str, Player] = {}
        self.agents: dict[str, pb.Agent] = {}
        self.interfaces: dict[str, Interface] = {}
        self.answers: dict[str, Answers] = {}
        self.env_ended: list[tuple[float, int]] = []
        self.env_steps = 0
        self._agent_returns: AgentReturns = {}
        self._names = dict.fromkeys(settings.casting.table)  # of all agents, with patterns
        self._infos: dict[str, deque[InfoNumber]] = {}  # of episodes that ended
        self._load = load_of()  # of all sessions

    @property
    def player(self) -> Player | None:
        """The player of simulators with one agent, if it is there."""
        return None if self._casting.table else self.players.get(DEFAULT_MODULE)

    def hello(self, stream: GatewayStream, hello: pb.Hello) -> None:
        """Begin a session, or let it go on.

        Raises:
            SessionError: it cannot.
        """
        check_hello(hello, self._casting.table)
        cast = self._casting.cast(hello)
        if hello.mode == pb.LOGGED_DATA and self._settings.refuses_logged:
            raise SessionError(Code.CANNOT_LEARN, self._settings.refuses_logged)
        resumed = bool(hello.resume_token)
        if resumed:
            session = self.sessions.resumed(hello)
            for agent, given in zip(session.agents, hello.agents, strict=True):
                self._must_have(self.agents[agent.player], given)
            if session.stream is not None:
                text = "another stream goes on with this session"
                self.last_word(session, SessionError(Code.SUPERSEDED, text))
            session.stream = stream
        else:
            session = self._begun(stream, hello, cast)
            session.seed = self._settings.curriculum.session_seed(stream.dialed)
            self.sessions.add(session)
            self._load += load_of(session)
        stream.session, session.peer = session, address_of(stream.peer)
        session.dialed = stream.dialed
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
            seed=session.seed,
            parameters=self._settings.curriculum.parameters,
        )
        # Answers from before a break come behind this, with older ones.
        session.parameters = None if resumed else self._settings.curriculum.parameters
        stream.send(pb.ToSimulator(welcome=welcome).SerializeToString())

    def _begun(
        self, stream: GatewayStream, hello: pb.Hello, cast: list[tuple[str, ...]]
    ) -> Session:
        """A new session, once its agents have players."""
        fresh: dict[str, tuple[pb.Agent, Interface]] = {}
        for given, players in zip(hello.agents, cast, strict=True):
            for key in players:
                if key not in self.agents and key not in fresh:
                    fresh[key] = self._read(given, key)
                self._must_have(self.agents[key] if key in self.agents else fresh[key][0], given)
        self._make_room(hello)
        for key, one in fresh.items():
            try:
                self._prepare(key, sum(key in players for players in cast), *one)
            except (WireError, UnsupportedSpace) as error:
                raise SessionError(Code.WRONG_SPACES, str(error)) from error
        several = bool(self._casting.table)
        agents = [
            SessionAgent(
                index,
                given.id if several else "",
                {key: self.players[key].seat(hello.environments) for key in players},
                self.interfaces[players[0]],
            )
            for index, (given, players) in enumerate(zip(hello.agents, cast, strict=True))
        ]
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
        return Session(agents, hello, stream, episodes, infos)

    def _prepare(self, key: str, count: int, agent: pb.Agent, interface: Interface) -> None:
        alike = (
            self.interfaces[each]
            for each, other in self.agents.items()
            if other.observation_space == agent.observation_space
            and other.action_space == agent.action_space
        )
        interface = next(alike, interface)
        player = self._work.prepare(key, count, *interface.spaces)
        self.players[key], self.agents[key], self.interfaces[key] = player, agent, interface
        self.answers[key] = Answers(interface.actions, module_of(key))

    def let_in(self, module_id: str) -> None:
        """Let another player of a league act from now on."""
        if not self.players:
            return  # no simulator has told them
        agent = pb.Agent()  # all agents of a league have equal spaces
        agent.CopyFrom(next(iter(self.agents.values())))
        agent.policy = module_id
        interface = next(iter(self.interfaces.values()))
        self._prepare(module_id, len(self._casting.table), agent, interface)
        for session in self.sessions.by_id.values():
            for each in session.agents:
                each.seat(module_id, self.players[module_id].seat(session.environments))

    def let_go(self, module_id: str) -> None:
        """Forget a player of a league that no running episode has."""
        for session in self.sessions.by_id.values():
            for each in session.agents:
                each.unseat(module_id)
        if (player := self.players.get(module_id)) is not None:
            self._counts.update(player.counts)
        for of_players in (self.players, self.agents, self.interfaces, self.answers):
            of_players.pop(module_id, None)

    def _make_room(self, hello: pb.Hello) -> None:
        """Close sessions of vanished simulators to make room for a new one.

        A simulator that keeps crashing would fill the gateway with them.

        Raises:
            SessionError: other sessions leave no room for it.
        """
        more, gone = load_of(hello), self.sessions.vanished()
        if error := no_room(more, self._load - load_of(*gone)):
            raise error
        while no_room(more, self._load):
            self.lose(gone.pop(0))

    def _read(self, given: pb.Agent, key: str) -> tuple[pb.Agent, Interface]:
        """What all agents of a player have in common.

        Raises:
            SessionError: no policy can learn in its spaces.
        """
        observation_space = read_space(given, "observation_space")
        action_space = read_space(given, "action_space")
        try:
            steps = self._settings.fragment_steps
            interface = fitting(observation_space, action_space, steps)
        except ValueError as error:
            raise SessionError(Code.WRONG_SPACES, f"{whose(given)}{error}") from error
        agent = pb.Agent(
            observation_space=space_to_message(observation_space),
            action_space=space_to_message(action_space),
            policy=module_of(key) if self._casting.table else "",
        )
        return agent, interface

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
        self.close(session, LOST)
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
            for key, of_agent in agent.seats.items():
                places[key] += of_agent.tolist()
        for key, of_player in places.items():
            self.players[key].unseat(of_player)
        if session.episodes is not None:
            session.episodes.leave()
        self.sessions.remove(session)
        self._load -= load_of(session)
        session.stream = None
        self.guests.left(session, why)

    # -- what becomes of episodes -----------------------------------------------------------------

    def shares(self, batch: Batch) -> list[Share]:
        """Book a batch of steps, and give its rows to players.

        Raises:
            SessionError: there is no line-up.
        """
        episodes = batch.session.episodes
        if episodes is None or not episodes.drawn:
            self._book(batch)
            return [whole(part, part.agent.player) for part in batch.parts]
        before = [self._players_of(part) for part in batch.parts]
        self._book(batch)
        if not batch.began:
            after = before
        else:
            try:
                episodes.begin(batch.began)
            except LineUpError as error:
                raise SessionError(Code.NOT_SERVED, str(error), batch.seq) from error
            after = [self._players_of(part) for part in batch.parts]
        parts = zip(batch.parts, before, after, strict=True)
        return [share for part, *players in parts for share in split(part, *players)]

    def _players_of(self, part: Steps) -> list[str]:
        """[R] the player that acts in each row now."""
        episodes = part.batch.session.episodes
        assert episodes is not None
        ids = episodes.players(part.environments)[:, part.index]
        return [part.agent.player_of(each) for each in ids.tolist()]

    def _book(self, batch: Batch) -> None:
        """Account for a batch of steps."""
        session, over = batch.session, batch.over
        if (episodes := session.episodes) is not None:
            booked = episodes.book(batch.parts, over, batch.idle)
            self.env_steps += booked.steps
            if over:
                returns, lengths = booked.env_returns.tolist(), booked.env_lengths.tolist()
                self.env_ended += zip(returns, lengths, strict=True)
                forget_oldest(self.env_ended)
                if has_metrics_by_agent(self._names):
                    into, players = self._agent_returns, episodes.players(over)
                    add_returns(into, episodes.names, players, booked.agent_returns)
                    for each in into.values():
                        forget_oldest(each)
                episodes.tell_ended(over, booked)
        if session.infos is not None:
            if (player := self.player) is not None and player.evaluates:
                for part in batch.parts:  # numbers of evaluations are not those of training
                    playing = player.of["playing"][part.agent.places]  # [N]
                    here = part.environments
                    part.rewarded = [at for at in part.rewarded if playing[here[at]] == TRAINING]
            session.infos.see(batch.parts, over)

    def take_played(self) -> PlayedRound:
        """What came of environments' episodes since the last call.

        Returns are there where simulators may have several agents, and of each agent if there are
        few.
        """
        ended, self.env_ended = self.env_ended, []
        of_agents, self._agent_returns = self._agent_returns, {}
        infos = {name: list(episodes) for name, episodes in self._infos.items()}
        self._infos.clear()
        return PlayedRound(
            {},
            {},
            [total for total, _ in ended],
            [length for _, length in ended],
            agent_returns=of_agents if has_metrics_by_agent(self._names) else {},
            infos=infos,
        )


_MOST_ROW_BYTES = 256 << 20
#: In an observation or an action, with choices encoded one-hot.
_MOST_NUMBERS = 1 << 22


def fitting(observation_space: Space[Any], action_space: Space[Any], steps: int) -> Interface:
    """The interface of spaces, if rows of them fit the memory.

    Raises:
        SessionError: they are too large.
        ValueError: masks do not fit the actions.
    """
    for name, space in (("observation", observation_space), ("action", action_space)):
        if (numbers := _numbers(space)) > _MOST_NUMBERS:
            text = f"an {name} is {numbers} numbers, with one for each value of what is counted"
            raise SessionError(Code.WRONG_SPACES, f"{text}: at most {_MOST_NUMBERS}")
    interface = Interface(observation_space, action_space)
    row_bytes = steps * sum(leaf.row_bytes for leaf in interface.observations.leaves)
    if row_bytes > _MOST_ROW_BYTES:
        text = f"{steps} observations take {row_bytes} bytes: at most {_MOST_ROW_BYTES}"
        raise SessionError(Code.WRONG_SPACES, text)
    return interface


def read_space(agent: pb.Agent, name: str) -> Space[Any]:
    """One of the spaces of an agent.

    Raises:
        SessionError: it is none.
    """
    try:
        return space_from_message(getattr(agent, name))
    except (WireError, UnsupportedSpace) as error:
        raise SessionError(Code.WRONG_SPACES, f"{whose(agent)}{name}: {error}") from error


def difference(one: Space[Any], other: Space[Any], its_name: str, other_name: str) -> str:
    """Describe how two spaces differ, for people.

    Args:
        one: a space.
        other: the space that it should be.
        its_name: what to call the first.
        other_name: what to call the second.
    """
    if type(one) is type(other) and isinstance(one, spaces.Dict | spaces.Tuple):
        its, others = _parts(one), _parts(other)
        if list(its) != list(others):
            return f"{its_name} has the parts {_few(its)}; {other_name} has {_few(others)}"
        for key, part in its.items():
            if space_to_message(part) != space_to_message(others[key]):
                at = f" at {key!r}"
                return difference(part, others[key], its_name + at, other_name + at)
    text, other_text = _one_line(one), _one_line(other)
    if text == other_text and isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        where = np.argwhere((one.low != other.low) | (one.high != other.high))
        for place in [tuple(each) for each in where.tolist()][:1]:
            text += f" with bounds of {one.low[place]} and {one.high[place]} at {list(place)}"
            other_text += f" with {other.low[place]} and {other.high[place]} there"
    elif text == other_text:
        text, other_text = f"{text} of {one.dtype}", f"{text} of {other.dtype}"
    return f"{its_name} is {text}; {other_name} is {other_text}"


def _parts(space: Any) -> dict[str, Space[Any]]:
    named = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
    return {str(key): part for key, part in named}


def _few(parts: Mapping[str, Space[Any]]) -> str:
    return ", ".join(map(repr, parts))[:200]


def _one_line(space: Space[Any]) -> str:
    # NumPy leaves out most of many numbers; the text of a message would have them all.
    return " ".join(str(space).split())[:200]


def _numbers(space: Space[Any]) -> int:
    """How many numbers a policy sees, with choices encoded one-hot."""
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
    """For people: how an error about an agent begins."""
    return f"agent {agent.id!r}: " if agent.id else ""


MOST_SESSIONS = 4096
MOST_ENVIRONMENTS = 1 << 16  # once for each agent
#: Numbers that all sessions together may tell of one step. Each takes 32 bytes, so all 8 MB.
MOST_NUMBERS = 1 << 18


def load_of(*sessions: Session | pb.Hello) -> NDArray[np.int64]:
    """The room that sessions take, as `no_room` counts it [3]."""
    load = np.zeros(3, np.int64)
    for each in sessions:
        environments = each.environments * len(each.agents)
        load += 1, environments, environments * len(each.info_names)
    return load


def no_room(more: NDArray[np.int64], here: NDArray[np.int64]) -> SessionError | None:
    """The error of a new session without room; None: there is room.

    Args:
        more: [3] of the new one: sessions; their environments, once for each agent; numbers that
            they tell of a step of all of these.
        here: [3] of the other sessions.
    """
    _, its_environments, its_numbers = more.tolist()
    sessions_here, environments_here, numbers_here = here.tolist()
    sessions, environments, numbers = (here + more).tolist()
    if its_environments > MOST_ENVIRONMENTS:
        text = (
            f"{its_environments} environments in one session, once for each agent: have at most "
            f"{MOST_ENVIRONMENTS}"
        )
        return SessionError(Code.FULL, text)
    if sessions > MOST_SESSIONS or environments > MOST_ENVIRONMENTS:
        text = (
            f"{sessions_here} sessions with {environments_here} environments are here, and at most "
            f"{MOST_SESSIONS} with {MOST_ENVIRONMENTS}, once for each agent, may be: start another "
            "gateway"
        )
    elif its_numbers and numbers > MOST_NUMBERS:
        text = (
            f"its info_names are {its_numbers} numbers for each step of all environments and "
            f"agents, {numbers_here} of other sessions are here, and at most {MOST_NUMBERS} may "
            "be: name fewer, or start another gateway"
        )
    else:
        return None
    return SessionError(Code.FULL, text, retryable=True)
