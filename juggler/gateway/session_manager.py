"""Opens, resumes and closes the sessions of a gateway."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from gymnasium import Space, spaces

from juggler.gateway.answers import Answers
from juggler.gateway.gateway_stream import MESSAGE_BYTES, GatewayStream
from juggler.gateway.player import Player
from juggler.gateway.row_layout import Layout, ValueChecks
from juggler.gateway.sessions import (
    PROTOCOL_MAX,
    RESUME_SECONDS,
    Code,
    Session,
    SessionError,
    Sessions,
    check_hello,
)
from juggler.gateway.step_batches import Steps
from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.spaces import space_from_message, space_to_message
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_MOST_ROW_BYTES = 256 << 20
#: In an observation or an action, with choices encoded one-hot.
_MOST_NUMBERS = 1 << 22


class Work(Protocol):
    """What a gateway acts for: it asks for samples and brings weights."""

    def prepare(self, observation_space: Space[Any], action_space: Space[Any]) -> Player:
        """Make the player. Called once, with the spaces of the first simulator."""

    def wanted(self) -> int:
        """Rows that may be begun now."""

    def patience(self) -> float:
        """Seconds to wait for events before `go_on` is called again."""

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
    """

    max_batch: int
    max_wait: float
    run_id: str
    fragment_steps: int
    resume_seconds: float = RESUME_SECONDS
    refuses_logged: str = ""


class SessionManager:
    """Opens sessions for simulators, and closes them.

    Args:
        work: what the gateway acts for.
        settings: of the gateway.
        counts: of events, by name.

    Attributes:
        sessions: all of them.
        player: acts for them; None until the first simulator has told its spaces.
        agent: with those spaces.
        answers: writes actions.
    """

    def __init__(self, work: Work, settings: GatewaySettings, counts: Counter[str]) -> None:
        self._work, self._settings, self._counts = work, settings, counts
        self.sessions = Sessions(settings.resume_seconds)
        self.player: Player | None = None
        self.agent = pb.Agent()
        self.answers: Answers

    def hello(self, stream: GatewayStream, hello: pb.Hello) -> None:
        environments = 0 if self.player is None else len(self.player.environments)
        check_hello(hello, environments, len(self.sessions.by_id))
        if hello.mode == pb.LOGGED_DATA and self._settings.refuses_logged:
            raise SessionError(Code.CANNOT_LEARN, self._settings.refuses_logged)
        resumed = bool(hello.resume_token)
        if resumed:
            session = self.sessions.resumed(hello)
            self._must_have_our_spaces(hello.agents[0])
            if session.stream is not None:
                text = "another stream goes on with this session"
                self.last_word(session, SessionError(Code.SUPERSEDED, text))
            session.stream = stream
        else:
            player = self._prepared(hello.agents[0])
            session = Session(player.environments.seat(hello.environments), hello, stream)
            self.sessions.add(session)
        stream.session = session
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

    def _prepared(self, agent: pb.Agent) -> Player:
        """The player, which is made for the spaces of the first simulator."""
        if self.player is None:
            try:
                observation_space = space_from_message(agent.observation_space)
                action_space = space_from_message(agent.action_space)
                _must_fit(observation_space, action_space, self._settings.fragment_steps)
                self.player = self._work.prepare(observation_space, action_space)
            except (WireError, UnsupportedSpace) as error:
                raise SessionError(Code.WRONG_SPACES, str(error)) from error
            self.answers = Answers(self.player.action_layout, "default")
            self.agent.observation_space.CopyFrom(space_to_message(observation_space))
            self.agent.action_space.CopyFrom(space_to_message(action_space))
        self._must_have_our_spaces(agent)
        return self.player

    def _must_have_our_spaces(self, agent: pb.Agent) -> None:
        for name in ("observation_space", "action_space"):
            ours, given = getattr(self.agent, name), getattr(agent, name)
            try:
                same = ours == given or space_to_message(space_from_message(given)) == ours
            except WireError as error:
                raise SessionError(Code.WRONG_SPACES, f"{name}: {error}") from error
            if not same:
                raise SessionError(
                    Code.WRONG_SPACES,
                    f"this {name} is {_one_line(given)}; that of the run's first simulator is "
                    f"{_one_line(ours)}: all simulators of a run must have the same",
                )

    def end(self, stream: GatewayStream, error: SessionError, arrivals: list[Steps]) -> None:
        """End the session of a stream that sent something wrong."""
        session = stream.session
        if session is None:
            stream.send(error.message().SerializeToString())
            stream.close()
            self._counts["hellos_refused"] += 1
        elif session.stream is stream:
            arrivals[:] = [steps for steps in arrivals if steps.session is not session]
            self.fail(session, error)

    def fail(self, session: Session, error: SessionError) -> None:
        self.last_word(session, error)
        self.close(session)
        self._counts["sessions_failed"] += 1

    def last_word(self, session: Session, error: SessionError) -> None:
        stream, session.stream = session.stream, None
        if stream is not None:
            stream.send(error.message().SerializeToString())
            stream.close()

    def close(self, session: Session) -> None:
        if session.id not in self.sessions.by_id:
            return  # it sent two wrong messages at once
        assert self.player is not None
        self.player.unseat(session.slots)
        self.sessions.remove(session)
        session.stream = None


def _must_fit(observation_space: Space[Any], action_space: Space[Any], steps: int) -> None:
    """Check that masks fit the actions, and that memory has room for policies and rows.

    Raises:
        SessionError: they do not, or it has not.
    """
    for name, space in (("observation", observation_space), ("action", action_space)):
        if (numbers := _numbers(space)) > _MOST_NUMBERS:
            text = f"an {name} is {numbers} numbers, with one for each value of what is counted"
            raise SessionError(Code.WRONG_SPACES, f"{text}: at most {_MOST_NUMBERS}")
    try:
        ValueChecks(observation_space, action_space)
    except ValueError as error:
        raise SessionError(Code.WRONG_SPACES, str(error)) from error
    row_bytes = steps * sum(leaf.row_bytes for leaf in Layout(observation_space).leaves)
    if row_bytes > _MOST_ROW_BYTES:
        text = f"{steps} observations take {row_bytes} bytes: at most {_MOST_ROW_BYTES}"
        raise SessionError(Code.WRONG_SPACES, text)


def _numbers(space: Space[Any]) -> int:
    """How many numbers a policy sees in a value of a space: choices are encoded one-hot."""
    numbers = 0
    for _, leaf in space_leaves(space):
        if isinstance(leaf, spaces.Discrete):
            numbers += int(leaf.n)
        elif isinstance(leaf, spaces.MultiDiscrete):
            numbers += int(leaf.nvec.sum(dtype=object))  # of any size
        else:
            numbers += math.prod(leaf.shape or ())
    return numbers


def _one_line(message: Any) -> str:
    return " ".join(str(message).split())[:200]
