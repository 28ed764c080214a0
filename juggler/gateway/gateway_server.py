"""The gateway's server, which answers messages of simulators."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from google.protobuf.message import DecodeError

from juggler.envrunner.rounds import PlayedRound
from juggler.gateway.guest_book import connected
from juggler.gateway.local_inference import LocalInference
from juggler.gateway.player import Acted
from juggler.gateway.row_layout import Layout
from juggler.gateway.session_manager import GatewaySettings, SessionManager, Work
from juggler.gateway.sessions import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    SERVED,
    Code,
    Session,
    SessionAgent,
    SessionError,
)
from juggler.gateway.shared_episodes import MOST_UNTOLD
from juggler.gateway.step_batches import Answers, Batch, Share, Steps, action_batch, read_steps
from juggler.gateway.transport import GatewayStream, Transport
from juggler.runtime.actors.tls import Tls
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_SWEEP_SECONDS = 0.25
#: A simulator that waits longer than this for an action is told so.
_TELL_SECONDS = 1.0
#: Streams at once that have sent no hello yet.
_MOST_SILENT = 1024


class GatewayServer:
    """Acts in turns.

    A turn takes everything that came since the last one, in a thread of the transport. A clock has
    a turn when something is due and nothing came.

    Args:
        transport: carries messages from and to simulators.
        work: what the gateway acts for.
        settings: of the gateway.
        failed: called with the error that ended the gateway.
        busy: a context around everything that may hang.

    Attributes:
        seconds: where its time went.
        counted: inferences, the rows and batches of steps in them, and the seconds that those
            batches waited, summed up.
    """

    def __init__(
        self,
        transport: Transport,
        work: Work,
        settings: GatewaySettings,
        failed: Callable[[BaseException], None],
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._transport, self._work, self._settings = transport, work, settings
        self._failed, self._busy = failed, busy
        self.seconds: dict[str, float] = defaultdict(float)
        self.counted: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._clock = Clock(self._strikes)
        events: Counter[str] = Counter()
        self._manager = SessionManager(work, settings, events)
        self._local = LocalInference(self._manager, settings.curriculum, self.wake)
        self._info = GatewayInfo(self._manager, settings, events, self.counted)
        self._arrivals: list[Batch] = []
        self._leaving: list[Session] = []
        self._silent: dict[GatewayStream, None] = {}  # without a hello, the oldest first
        self._news = False
        self._began = 0.0  # to take messages, seconds
        self._next_sweep = 0.0
        self._over = False

    def start(self, address: str, tls: Tls | None, insecure: bool) -> str:
        """As `Transport.start`."""
        bound = self._transport.start(self, address, tls, insecure)
        self._clock.start()
        self.wake()
        return bound

    def take_played(self) -> PlayedRound:
        """What came of environments' episodes since the last call.

        Returns are there where simulators may have several agents.
        """
        manager = self._manager
        returns, lengths = zip(*manager.env_ended, strict=True) if manager.env_ended else ((), ())
        manager.env_ended = []
        return PlayedRound(
            {},
            {},
            [*returns],
            [*lengths],
            agent_returns=manager.take_agent_returns(),
            infos=manager.take_infos(),
        )

    @property
    def env_steps(self) -> int:
        """As `SessionManager.env_steps`."""
        return self._manager.env_steps

    def let_in(self, module_id: str) -> None:
        """As `SessionManager.let_in`."""
        self._manager.let_in(module_id)

    def let_go(self, module_id: str) -> None:
        """As `SessionManager.let_go`."""
        self._manager.let_go(module_id)

    def counts(self) -> dict[str, float]:
        """As `GatewayInfo.counts`."""
        return self._info.counts()

    @property
    def asking(self) -> int:
        """As `Sessions.asking`."""
        return self._manager.sessions.asking

    @property
    def sessions(self) -> Collection[Session]:
        """The open ones, whether or not their simulators are connected."""
        return self._manager.sessions.by_id.values()

    def lose(self, session: Session) -> None:
        """As `SessionManager.lose`."""
        self._manager.lose(session)

    def connected(self) -> tuple[int, int]:
        """As `guest_book.connected`."""
        return connected(self._manager.sessions)

    def wake(self) -> None:
        """Call `Work.go_on` soon. May be called in any thread."""
        self._clock.within(0.0)

    def close(self, reason: str) -> None:
        """Tell all simulators, and end."""
        self._clock.close()
        with self._lock:
            self._over = True
            for session in self._manager.sessions.by_id.values():
                error = SessionError(Code.ENDED, f"the gateway leaves: {reason}", retryable=True)
                self._manager.last_word(session, error)
        self._transport.close()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """One thread at a time. An error ends the gateway."""
        with self._lock, self._busy():
            self._began = time.perf_counter()
            try:
                yield
            except BaseException as error:  # the process ends for it
                self._over = True
                self._failed(error)

    def between_turns(self) -> AbstractContextManager[Any]:
        """Hold turns up, for a command of the driver."""
        return self._lock

    # -- turns ----------------------------------------------------------------------------------

    def turn(self) -> None:
        if self._over or not self._news:
            return
        self.seconds["messages"] += time.perf_counter() - self._began
        if self._arrivals and (wait := self._worth_waiting()):
            self._clock.within(wait)
        else:
            self._take_turn()

    def _strikes(self) -> None:
        with self.at_work():
            self._news = True  # steps may be waiting for those of others
            self.turn()

    def _worth_waiting(self) -> float:
        """Seconds to wait for steps of other simulators."""
        if not self._settings.max_wait:
            return 0.0
        enough = min(self._settings.max_batch, self._manager.sessions.asking)
        if len(self._arrivals) >= enough:
            return 0.0
        waited = time.perf_counter() - self._arrivals[0].arrived
        return max(0.0, self._settings.max_wait - waited)

    def _take_turn(self) -> None:
        self._news = False
        self._take_in()
        self._act()
        self._work.go_on()
        self._act()  # for requests that have just come
        if self._manager.player is not None:
            self._local.go_on(self._work.wanted(DEFAULT_MODULE))
            self._work.go_on()
        self._sweep()
        self._clock.within(min(_SWEEP_SECONDS, self._work.patience()))

    def _take_in(self) -> None:
        began = time.perf_counter()
        arrivals, self._arrivals = self._arrivals, []
        if arrivals:
            self.seconds["gathering"] += began - arrivals[0].arrived
            self._take_steps(arrivals)
        leaving, self._leaving = self._leaving, []
        for session in leaving:
            if session.stream is not None:
                session.stream.close()
            self._manager.close(session, "it said goodbye")
        self.seconds["messages"] += time.perf_counter() - began

    def _take_steps(self, arrivals: list[Batch]) -> None:
        by_player: dict[str, list[Steps]] = defaultdict(list)
        refused: set[Steps] = set()
        errors: dict[Session, SessionError] = {}
        for batch in arrivals:
            episodes = batch.session.episodes
            if episodes is not None and episodes.seats.drawn:
                try:
                    if batch.session not in errors:
                        self._manager.begin_episodes(batch)
                except SessionError as wrong:
                    errors[batch.session] = wrong
                if batch.session in errors:
                    continue
            for steps in batch.parts:
                for share in steps.shares or (steps,):
                    by_player[share.player].append(share)
        for player, of_player in by_player.items():
            for steps, refusal in self._manager.players[player].arrive(of_player):
                refused.add(steps)
                errors.setdefault(steps.session, refusal)
        for batch in arrivals:
            if batch.session.episodes is not None and batch.session.episodes.seats.drawn:
                continue  # booked before others began to act there
            taken = [steps for steps in batch.parts if steps not in refused]
            over = batch.over if len(taken) == len(batch.parts) else []
            self._manager.book(batch.session, taken, over)
        for session, error in errors.items():
            self._manager.fail(session, error)

    # -- what streams say -----------------------------------------------------------------------

    def came(self, stream: GatewayStream) -> None:
        self._silent[stream] = None
        if len(self._silent) <= _MOST_SILENT:
            return
        oldest = next(iter(self._silent))
        del self._silent[oldest]
        text = f"{_MOST_SILENT} others came, and this stream has sent no hello yet"
        error = SessionError(Code.EXPECTED_HELLO, text, retryable=True)
        self._manager.end(oldest, error, self._arrivals)

    def said(self, stream: GatewayStream, message: bytes) -> None:
        if self._over:
            return
        self._silent.pop(stream, None)
        self._news = True
        try:
            self._message(stream, message)
        except SessionError as error:
            self._manager.end(stream, error, self._arrivals)

    def gone(self, stream: GatewayStream) -> None:
        self._silent.pop(stream, None)
        session = stream.session
        if session is None or session.stream is not stream or session in self._leaving:
            return  # a simulator closes its stream behind a goodbye
        self._manager.vanish(session)

    def refused(self, peer: str, why: str) -> None:
        self._manager.guests.refused(peer, why)

    def info(self) -> bytes:
        return self._info.message().SerializeToString()

    def _message(self, stream: GatewayStream, raw: bytes) -> None:
        session = stream.session
        try:
            message = pb.FromSimulator.FromString(raw)
        except DecodeError:
            text = "bytes that are no FromSimulator of simulator.proto"
            raise SessionError(Code.BAD_MESSAGE, text) from None
        kind = message.WhichOneof("message")
        if session is None:
            if kind != "hello":
                text = f"the first message of a stream must be a hello, not {kind or 'empty'}"
                raise SessionError(Code.EXPECTED_HELLO, text)
            self._take_in()  # before a new session may get the places of one that is gone
            self._manager.hello(stream, message.hello)
            return self._local.resumed(stream.session)
        if session.stream is not stream:
            return None  # another stream has resumed the session
        match kind:
            case "steps":
                self._steps(session, message.steps)
            case "goodbye":
                self._leaving.append(session)  # once its last steps are taken
            case "hello":
                text = "a second hello on one stream: open another stream for another session"
                raise SessionError(Code.SECOND_HELLO, text)
            case "recording":
                self._local.recording(session, message.recording)
            case "policy":
                self._local.policy(session, message.policy)
            case _:
                raise SessionError(Code.BAD_MESSAGE, "a message with nothing in it")

    def _steps(self, session: Session, message: pb.StepBatch) -> None:
        session.must_be(pb.REMOTE_INFERENCE)
        if session.repeats(message.seq):
            return
        batch = read_steps(session, message, self._layout_of)
        for steps in batch.parts:
            for at in steps.ended:
                steps.agent.acted[steps.environments[at]] = 0
            steps.agent.asks(steps.environments)
        self._arrivals.append(batch)

    def _layout_of(self, agent: SessionAgent) -> Layout:
        return self._manager.players[agent.player].layout

    # -- what they are told ---------------------------------------------------------------------

    def _act(self) -> None:
        for key, player in self._manager.players.items():
            while player.waiting:
                started = time.perf_counter()
                wanted, holds_up = self._work.wanted(key), self._work.holds_up(key)
                answers = player.act(wanted, self._settings.max_batch, holds_up)
                if not answers:
                    break
                for answer in answers:
                    self._answer(answer)
                    self.counted["waited_seconds"] += started - answer.steps.batch.arrived
                    self.counted["inferred_rows"] += answer.steps.rows
                self.seconds["inference"] += time.perf_counter() - started
                self.counted["inferences"] += 1
                self.counted["inferred_batches"] += len(answers)

    def _answer(self, answer: Acted) -> None:
        """Answer a batch of steps that has its last actions."""
        steps, batch = answer.steps, answer.steps.batch
        writes = self._manager.answers[steps.player]
        actions, version = answer.actions, answer.version
        if isinstance(steps, Share):
            share, steps = steps, steps.whole
            steps.shared.append((share, actions, version))
            if len(steps.shared) < len(steps.shares):
                return
            writes, actions, version = self._merged(steps)
        batch.answers[steps.index] = writes.part(steps.index, steps.rows, actions, version)
        if len(batch.answers) < len(batch.parts):
            return
        for part in batch.parts:
            part.agent.acts(part.environments)
            for at in part.paused:
                part.agent.acted[part.environments[at]] = 0
        batch.session.told_to_wait = False
        parts = [batch.answers[part.index] for part in batch.parts]
        news = self._settings.curriculum.news_for(batch.session)
        batch.session.answers(batch.seq, action_batch(batch.seq, parts, news))

    def _merged(self, steps: Steps) -> tuple[Answers, list[bytes], Version]:
        """The actions of an agent for whom several players have acted."""
        layout = self._manager.players[steps.agent.player].action_layout
        acted = [each for each in steps.shared if len(each[0].paused) < each[0].rows]
        writes, version = Answers(layout, ""), Version(0, 0)
        if len(acted) == 1:
            writes, version = self._manager.answers[acted[0][0].player], acted[0][2]
        merged = [bytearray(steps.rows * leaf.row_bytes) for leaf in layout.leaves]
        for share, actions, _ in acted:
            out = set(share.paused)
            for at, row in enumerate(share.within):
                if at in out:
                    continue
                for whole, own, leaf in zip(merged, actions, layout.leaves, strict=True):
                    size = leaf.row_bytes
                    whole[row * size : (row + 1) * size] = own[at * size : (at + 1) * size]
        return writes, [bytes(each) for each in merged], version

    def _sweep(self) -> None:
        """Do what is due every now and then."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_SECONDS
        self._manager.guests.look()
        players = self._manager.players.values()
        for player in players:
            player.environments.hand_in_stalled()
            player.recorder.hand_in_stalled()
        for session in self._manager.sessions.overdue():
            self._manager.lose(session)
        since = time.perf_counter() - _TELL_SECONDS
        late: set[Session] = set()
        for player in players:
            late |= {each.session for each in player.waiting if each.batch.arrived < since}
            late |= {each.session for each in player.recorder.waiting if each.arrived < since}
        tell_to_wait(late)
        if any(player.environments.counts["episodes_untold"] for player in players):
            tell_of_untold(self._manager.sessions.by_id.values())


_FAR = 1e9  # seconds: nothing is due


class Clock:
    """A thread that calls back when something is due.

    Args:
        strike: called in the clock's thread, once for everything that is due.
    """

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self._news = threading.Condition()
        self._due = time.monotonic() + _FAR
        self._over = False
        self._thread = threading.Thread(target=self._run, name="gateway-clock", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def within(self, seconds: float) -> None:
        """Strike within these seconds. May be called in any thread."""
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
                self._due = time.monotonic() + _FAR
            self._strike()


class GatewayInfo:
    """Tells what a gateway has, and what it has done.

    Args:
        manager: of the sessions.
        settings: of the gateway.
        events: how often each happened.
        counted: of inferences, as `GatewayServer.counted`.
    """

    def __init__(
        self,
        manager: SessionManager,
        settings: GatewaySettings,
        events: Counter[str],
        counted: Mapping[str, float],
    ) -> None:
        self._manager, self._settings = manager, settings
        self._events, self._counted = events, counted

    def message(self) -> pb.Info:
        info = pb.Info(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            run_id=self._settings.run_id,
            modes=self._modes(),
            counts=self.counts(),
        )
        info.agents.extend(self._manager.agents.values())
        return info

    def counts(self) -> dict[str, float]:
        """Counts of events so far and of what is here, by name."""
        counts: dict[str, float] = defaultdict(float, {**self._events, **self._counted})
        sessions = self._manager.sessions.by_id.values()
        counts["sessions"] = len(sessions)
        counts["environments"] = sum(session.environments for session in sessions)
        for player in self._manager.players.values():
            for name, count in player.environments.counts.items():
                counts[name] += count
            counts["steps_waiting"] += len(player.waiting)
            counts["recorded_steps_waiting"] += player.recorder.steps_waiting
        if inferences := counts["inferences"]:
            counts["rows_per_inference"] = counts["inferred_rows"] / inferences
        return counts

    def _modes(self) -> list[pb.Mode]:
        if self._settings.casting.table:
            return [pb.REMOTE_INFERENCE]
        return [m for m in SERVED if m != pb.LOGGED_DATA or not self._settings.refuses_logged]


def tell_to_wait(waiting: Iterable[Session]) -> None:
    """Tell simulators that have waited for long, each once per answer."""
    text = "no samples are requested now; answers come as soon as they are"
    for session in waiting:
        if session.stream is not None and not session.told_to_wait:
            session.stream.send(_notice(text))
            session.told_to_wait = True


def tell_of_untold(sessions: Iterable[Session]) -> None:
    """Tell simulators, each once, that not all of their episodes are counted."""
    text = f"no samples were requested for long: of the episodes that ended, {MOST_UNTOLD:,}"
    for session in sessions:
        if session.stream is not None and not session.told_of_untold:
            session.stream.send(_notice(f"{text} are counted, the newest"))
            session.told_of_untold = True


def _notice(text: str) -> bytes:
    notice = pb.Notice(kind=pb.Notice.WAITING, text=text)
    return pb.ToSimulator(notice=notice).SerializeToString()
