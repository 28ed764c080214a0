"""The gateway's server, which answers simulators."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from google.protobuf.message import DecodeError

from juggler.gateway.agents import module_of
from juggler.gateway.recordings import LocalInference, Recording
from juggler.gateway.session_errors import Code, SessionError
from juggler.gateway.session_manager import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    SERVED,
    GatewaySettings,
    GatewayWork,
    SessionManager,
)
from juggler.gateway.sessions import AgentInterface, AgentSteps, GatewaySession, StepMessage
from juggler.gateway.step_batches import (
    PlayerRows,
    read_observations,
    read_steps,
    write_actions,
)
from juggler.gateway.transport import GatewayStream, Transport
from juggler.runtime.actors.tls import Tls
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.structures import first_leaf, take
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_SWEEP_SECONDS = 0.25
#: A simulator gets a notice if it waits longer than this for an action.
_NOTICE_SECONDS = 1.0
_TEXT = "no samples are requested now; answers follow as soon as they are"
_NOTICE = pb.ToSimulator(notice=pb.Notice(kind=pb.Notice.WAITING, text=_TEXT)).SerializeToString()
#: Maximum number of streams that have sent no hello yet.
_MOST_SILENT = 1024


class GatewayServer:
    """Processes messages of simulators in turns.

    A turn processes everything received since the last turn, in a thread of the transport. A clock
    starts a turn when something is due and no message comes.

    Args:
        work: source of weights and of requests for samples.
        busy: a context around all code that may hang.
    """

    def __init__(
        self,
        transport: Transport,
        work: GatewayWork,
        settings: GatewaySettings,
        failed: Callable[[BaseException], None],
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._transport, self._work, self._settings = transport, work, settings
        self._failed, self._busy = failed, busy
        self.seconds: dict[str, float] = defaultdict(float)
        # Numbers of inferences, of their rows and of their batches of steps, and total seconds that
        # these batches waited.
        self.counted: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._clock = Clock(self._strikes)
        self._events: Counter[str] = Counter()
        self.manager = SessionManager(work, settings, self._events)
        # Everything below is used within `at_work` only.
        self._local: LocalInference | None = None  # made with the player
        self._arrivals: list[StepMessage] = []
        self._leaving: list[GatewaySession] = []
        self._silent: dict[GatewayStream, None] = {}  # without a hello, oldest first
        self._news = False
        self._began = 0.0  # when the current thread got the lock, in seconds
        self._next_sweep = 0.0
        self._over = False

    def start(self, address: str, tls: Tls | None, insecure: bool) -> str:
        """Start as `Transport.start` does."""
        bound = self._transport.start(self, address, tls, insecure)
        self._clock.start()
        self.wake()
        return bound

    def wake(self, seconds: float = 0.0) -> None:
        """Have `GatewayWork.after_turn` called within seconds. Any thread may call this."""
        self._clock.within(seconds)

    def close(self, reason: str) -> None:
        """Send all simulators the reason, and stop."""
        self._clock.close()
        with self._lock:
            self._over = True
            for session in self.manager.sessions.by_id.values():
                error = SessionError(Code.ENDED, f"the gateway leaves: {reason}", retryable=True)
                self.manager.send_error(session, error)
        self._transport.close()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the lock; an error ends the gateway."""
        with self._lock, self._busy():
            self._began = time.perf_counter()
            try:
                yield
            except BaseException as error:  # ends the process
                self._over = True
                self._failed(error)

    def between_turns(self) -> AbstractContextManager[Any]:
        """Hold the lock between turns, for a command of the driver."""
        return self._lock

    # -- turns ----------------------------------------------------------------------------------

    def turn(self) -> None:
        if self._over or not self._news:
            return
        self.seconds["messages"] += time.perf_counter() - self._began
        if self._arrivals and (wait := self._worth_waiting()):
            self.wake(wait)
        else:
            self._process_turn()

    def _strikes(self) -> None:
        with self.at_work():
            self._news = True  # steps may be waiting for other steps
            self.turn()

    def _worth_waiting(self) -> float:
        """Return the seconds to wait for steps of other simulators."""
        if not self._settings.max_wait:
            return 0.0
        enough = min(self._settings.max_batch, self.manager.sessions.asking)
        if len(self._arrivals) >= enough:
            return 0.0
        waited = time.perf_counter() - self._arrivals[0].arrived
        return max(0.0, self._settings.max_wait - waited)

    def _process_turn(self) -> None:
        self._news = False
        self._process_arrivals()
        self._act()
        self._work.after_turn()
        self._act()  # for new requests
        if self._local is not None:
            self._local.advance(self._work.wanted(DEFAULT_MODULE) or 0)
            self._work.after_turn()
        self._sweep()
        self.wake(_SWEEP_SECONDS)

    def _process_arrivals(self) -> None:
        began = time.perf_counter()
        arrivals, self._arrivals = self._arrivals, []
        if arrivals:
            self.seconds["gathering"] += began - arrivals[0].arrived
            self._process_steps(arrivals)
        leaving, self._leaving = self._leaving, []
        for session in leaving:
            if session.stream is not None:
                session.stream.close()
            self.manager.close(session, "it said goodbye")
        self.seconds["messages"] += time.perf_counter() - began

    def _process_steps(self, arrivals: list[StepMessage]) -> None:
        alike: dict[AgentInterface, list[AgentSteps]] = defaultdict(list)
        for batch in arrivals:
            for steps in batch.parts:
                alike[steps.agent.interface].append(steps)
        shown: dict[AgentInterface, Tree] = {}
        refused: dict[StepMessage, SessionError] = {}
        # Agents with equal spaces share arrays: many messages are as cheap as one.
        for interface, parts in alike.items():
            shown[interface], found = read_observations(interface, parts)
            for steps, refusal in found:
                refused.setdefault(steps.batch, refusal)
        # A session at fault ends alone, and its earlier batches still count.
        errors: dict[GatewaySession, SessionError] = {}
        by_player: dict[str, list[PlayerRows]] = defaultdict(list)
        booked = []
        for batch in arrivals:
            if batch.session in errors:
                continue  # only batches before the error count
            try:
                if batch in refused:
                    raise refused[batch]
                for share in self.manager.shares(batch):
                    by_player[share.player].append(share)
                booked.append(batch)
            except SessionError as wrong:
                errors[batch.session] = wrong
        # A player gets all of its rows at once, for a common inference.
        for key, shares in by_player.items():
            tree = shown[self.manager.players[key].interface]
            self.manager.players[key].receive(shares, rows_of(shares, tree))
        if self.manager.evaluations.began:
            for batch in booked:
                self.manager.evaluations.follow(batch)
        for session, error in errors.items():
            self.manager.fail(session, error)

    # -- events of streams ----------------------------------------------------------------------

    def connected(self, stream: GatewayStream) -> None:
        self._silent[stream] = None
        if len(self._silent) <= _MOST_SILENT:
            return
        oldest = next(iter(self._silent))
        del self._silent[oldest]
        text = f"{_MOST_SILENT} others connected, and this stream has sent no hello yet"
        error = SessionError(Code.EXPECTED_HELLO, text, retryable=True)
        self.manager.end(oldest, error, self._arrivals)

    def received(self, stream: GatewayStream, message: bytes) -> None:
        if self._over:
            return
        self._silent.pop(stream, None)
        self._news = True
        try:
            self._message(stream, message)
        except SessionError as error:
            self.manager.end(stream, error, self._arrivals)

    def disconnected(self, stream: GatewayStream) -> None:
        self._silent.pop(stream, None)
        session = stream.session
        if session is None or session.stream is not stream or session in self._leaving:
            return  # simulators close their streams after a goodbye
        self.manager.vanish(session)

    def refused(self, peer: str, why: str) -> None:
        self.manager.guests.refused(peer, why)

    def _message(self, stream: GatewayStream, raw: bytes) -> None:
        session = stream.session
        try:
            message = pb.FromSimulator.FromString(raw)
        except DecodeError:
            text = "bytes that are no FromSimulator of simulator.proto"
            raise SessionError(Code.BAD_MESSAGE, text) from None
        kind = message.WhichOneof("message")
        # Nothing is kept of a stream before its hello is accepted.
        if session is None:
            if kind != "hello":
                text = f"the first message of a stream must be a hello, not {kind or 'empty'}"
                raise SessionError(Code.EXPECTED_HELLO, text)
            self._process_arrivals()  # the new session may reuse places of a closed one
            self.manager.hello(stream, message.hello)
            if self._local is None and (player := self.manager.player) is not None:
                curriculum = self._settings.curriculum
                self._local = LocalInference(self.manager, player, curriculum, self.wake)
            elif self._local is not None:
                self._local.resumed(stream.session)
            return None
        # A simulator sends again on its new stream what had no answer.
        if session.stream is not stream:
            return None  # another stream resumed the session
        match kind:
            case "steps":
                self._steps(session, message.steps, raw)
            case "goodbye":
                self._leaving.append(session)  # closed after its last steps
            case "hello":
                text = "a second hello on one stream: open another stream for another session"
                raise SessionError(Code.SECOND_HELLO, text)
            case "recording" if self._local is not None:
                self._local.recording(session, message.recording, raw)
            case "policy" if self._local is not None:
                self._local.policy(session, message.policy)
            # Without a player of one agent, the run has no policy to hand out.
            case "recording" | "policy":
                session.must_be(pb.LOCAL_INFERENCE, pb.LOGGED_DATA)
            case _:
                raise SessionError(Code.BAD_MESSAGE, "a message with nothing in it")

    def _steps(self, session: GatewaySession, message: pb.StepBatch, raw: bytes) -> None:
        session.must_be(pb.REMOTE_INFERENCE)
        if session.repeats(message.seq, raw):
            return
        batch = read_steps(session, message)
        for steps in batch.parts:
            for at in steps.ended:
                steps.agent.acted[steps.environments[at]] = 0
            steps.agent.asks(steps.environments)
        self._arrivals.append(batch)

    # -- answers --------------------------------------------------------------------------------

    def _act(self) -> None:
        for key, player in self.manager.players.items():
            while player.waiting:
                started = time.perf_counter()
                wanted = self._work.wanted(key)
                # Steps that wait for a request would hold up an evaluation.
                holds_up = wanted is not None and self.manager.evaluations.running is None
                answers = player.answer(wanted or 0, self._settings.max_batch, holds_up)
                if not answers:
                    break
                for share in answers:
                    self.counted["waited_seconds"] += started - share.steps.batch.arrived
                    self.counted["inferred_rows"] += len(share.slots)
                # A batch of several agents may have several shares among them.
                for batch in dict.fromkeys(share.steps.batch for share in answers):
                    self._answer(batch)
                self.seconds["inference"] += time.perf_counter() - started
                self.counted["inferences"] += 1
                self.counted["inferred_batches"] += len(answers)

    def _answer(self, batch: StepMessage) -> None:
        """Answer a batch of steps once it has all actions."""
        # A message is answered as a whole, although several players may act.
        if any(part.due for part in batch.parts):
            return
        answer = pb.ToSimulator()
        answer.actions.seq = batch.seq
        for part in batch.parts:
            part.agent.acts(part.environments)
            for at in part.paused:
                part.agent.acted[part.environments[at]] = 0
            write_actions(part, answer.actions)
        if news := self._settings.curriculum.news_for(batch.session):
            answer.actions.parameters.update(news)
        batch.session.answers(batch.seq, answer.SerializeToString())

    def _sweep(self) -> None:
        """Do periodic work, if it is due."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_SECONDS
        self.manager.guests.report_omitted()
        players = self.manager.players.values()
        for player in players:
            player.flush_stalled()
        for session in self.manager.sessions.overdue():
            self.manager.lose(session)
        # A simulator that waits looks as if it hung, so it gets the reason once.
        since = time.perf_counter() - _NOTICE_SECONDS
        waiting: list[StepMessage | Recording] = [
            *(() if self._local is None else self._local.waiting)
        ]
        waiting += [share.steps.batch for player in players for share in player.waiting]
        for session in {each.session for each in waiting if each.arrived < since}:
            if session.stream is not None and not session.knows_of_wait:
                session.stream.send(_NOTICE)
                session.knows_of_wait = True

    # -- information about the gateway ------------------------------------------------------------

    def info(self) -> bytes:
        info = pb.Info(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            run_id=self._settings.run_id,
            modes=[pb.REMOTE_INFERENCE],
            counts=self.counts(),
        )
        if not self._settings.casting.table:
            without = pb.LOGGED_DATA if self._settings.refuses_logged else None
            info.modes[:] = [mode for mode in SERVED if mode != without]
        for key, player in self.manager.players.items():
            observed, acted = player.interface.messages
            policy = module_of(key) if self._settings.casting.table else ""
            info.agents.add(observation_space=observed, action_space=acted, policy=policy)
        return info.SerializeToString()

    def counts(self) -> dict[str, float]:
        """Return counts of events, sessions and waiting steps, by name."""
        counts: dict[str, float] = defaultdict(float, {**self._events, **self.counted})
        sessions = self.manager.sessions.by_id.values()
        counts["sessions"] = len(sessions)
        counts["environments"] = sum(session.environments for session in sessions)
        for player in self.manager.players.values():
            for name, count in player.counts.items():
                counts[name] += count
            counts["steps_waiting"] += len(player.waiting)
        recorded = () if self._local is None else self._local.waiting
        counts["recorded_steps_waiting"] = sum(recording.left for recording in recorded)
        if inferences := counts["inferences"]:
            counts["rows_per_inference"] = counts["inferred_rows"] / inferences
        return counts


def rows_of(shares: Sequence[PlayerRows], shown: Tree) -> Tree:
    """Select the observations [B, ...] of shares, in order."""
    whole = all(share.rows is None for share in shares)
    if whole and sum(share.steps.rows for share in shares) == len(first_leaf(shown)):
        return shown
    rows = (range(share.steps.rows) if share.rows is None else share.rows for share in shares)
    starts = (share.steps.begin for share in shares)
    at = [begin + row for begin, each in zip(starts, rows, strict=True) for row in each]
    found: Tree = take(shown, at)
    return found


class Clock:
    """A thread with one adjustable alarm."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self._news = threading.Condition()
        self._due = math.inf  # nothing is due
        self._over = False
        self._thread = threading.Thread(target=self._run, name="gateway-clock", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def within(self, seconds: float) -> None:
        """Set the alarm to at most these seconds, from any thread."""
        due = time.monotonic() + seconds
        if due >= self._due:
            return
        with self._news:
            self._due = min(due, self._due)
            self._news.notify()

    def close(self) -> None:
        with self._news:
            self._over = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._over and (left := self._due - time.monotonic()) > 0:
                    self._news.wait(min(left, threading.TIMEOUT_MAX))
                if self._over:
                    return
                self._due = math.inf  # nothing is due
            self._strike()
