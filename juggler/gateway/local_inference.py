"""Recordings of simulators that act by themselves, and policies for them."""

from __future__ import annotations

from collections.abc import Callable

from juggler.gateway.curriculum import Curriculum
from juggler.gateway.player import Player
from juggler.gateway.recordings import Recording
from juggler.gateway.session_manager import SessionManager
from juggler.gateway.sessions import Code, Session, SessionError
from juggler.gateway.step_batches import to_message
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb

#: The most bytes of recordings that wait for requests for samples.
_MOST_WAITING_BYTES = 1 << 30


class LocalInference:
    """A part of `GatewayServer`, used within its `at_work`.

    Args:
        manager: of the sessions.
        curriculum: of the episodes.
        wake: has `go_on` called soon; may be called in any thread.
    """

    def __init__(
        self, manager: SessionManager, curriculum: Curriculum, wake: Callable[[], None]
    ) -> None:
        self._manager, self._curriculum, self._wake = manager, curriculum, wake
        self._asking: list[Session] = []  # for a policy
        self._told = Version(0, 0)  # to everybody

    def recording(self, session: Session, message: pb.Recording) -> None:
        """
        Raises:
            SessionError: its session may not say that.
        """
        session.must_be(pb.LOCAL_INFERENCE, pb.LOGGED_DATA)
        if session.repeats(message.seq):
            return
        player = self._player
        recording = player.reader.read(session, message)
        self._must_be_known(player, recording)
        recording.bytes = message.ByteSize()
        if player.recorder.bytes_waiting + recording.bytes > _MOST_WAITING_BYTES:
            text = "more recordings wait than the gateway can hold: send smaller ones"
            raise SessionError(Code.FULL, text, message.seq, retryable=True)
        ended = recording.terminated or recording.truncated
        session.alone.acted[recording.environment] = 0 if ended else 1
        player.record(recording)

    def resumed(self, session: Session) -> None:
        """Announce weights again, as a broken stream may have lost the news."""
        if session.has_policy is not None:
            session.wants_news = True
            self._announce(session)

    def policy(self, session: Session, request: pb.PolicyRequest) -> None:
        """Send a policy to a session that asks for it.

        Raises:
            SessionError: its session may not ask for one, or there is none of this name.
        """
        session.must_be(pb.LOCAL_INFERENCE)
        if request.policy not in ("", DEFAULT_MODULE):
            text = f"the policy {request.policy[:64]!r} is asked for, and this run has"
            text += f" {DEFAULT_MODULE!r}: ask for that one, or leave the name out"
            raise SessionError(Code.NOT_SERVED, text)
        self._player.publisher.begin(self._wake)
        if session not in self._asking:
            self._asking.append(session)

    def go_on(self, wanted: int) -> None:
        """Answer recordings that were used, and requests for policies.

        Args:
            wanted: rows that may be begun.
        """
        player = self._manager.player
        if player is None:
            return
        newest = to_message(player.version)
        for recording in player.recorder.go_on(wanted) if player.recorder.waiting else ():
            if (infos := recording.session.infos) is not None:
                ends = recording.terminated or recording.truncated
                infos.record(
                    recording.environment, recording.infos, starts=recording.starts, ends=ends
                )
            recorded = pb.Recorded(seq=recording.seq, stale=recording.stale, newest=newest)
            if self._curriculum.news_for(recording.session):
                recorded.parameters.update(self._curriculum.parameters)
            message = pb.ToSimulator(recorded=recorded).SerializeToString()
            recording.session.told_to_wait = False
            recording.session.answers(recording.seq, message)
        if player.version == Version(0, 0):
            return  # there are no weights yet
        if self._asking and (player.publisher.ready or player.publisher.failure):
            asking, self._asking = self._asking, []
            for session in asking:
                self._give_policy(player, session)
        if player.version != self._told:
            self._told = player.version
            for session in self._manager.sessions.by_id.values():
                self._announce(session)

    def _give_policy(self, player: Player, session: Session) -> None:
        stream = session.stream
        if stream is None:
            return  # a simulator that comes back asks again
        if player.publisher.failure:
            text = f"the policy cannot be handed out: {player.publisher.failure}"
            return self._manager.fail(session, SessionError(Code.NOT_EXPORTED, text))
        session.has_policy, session.wants_news = player.version, True
        for chunk in player.publisher.chunks(player.version):
            stream.send(chunk.SerializeToString())

    def _announce(self, session: Session) -> None:
        newest = self._player.version
        if session.stream is None or not session.wants_news or session.has_policy == newest:
            return
        session.wants_news = False
        news = pb.NewPolicy(policy=DEFAULT_MODULE, version=to_message(newest))
        session.stream.send(pb.ToSimulator(new_policy=news).SerializeToString())

    @property
    def _player(self) -> Player:
        assert self._manager.player is not None
        return self._manager.player

    def _must_be_known(self, player: Player, recording: Recording) -> None:
        """Check that its weights came from here, in order.

        Raises:
            SessionError: they did not, or are.
        """
        version, versions = recording.version, recording.session.alone.versions
        if version is None:
            return
        too_old = version.update < player.version.update - player.recorder.row_age
        if not (too_old or player.publisher.gave(version)):
            text = (
                f"weights {tuple(version)} acted, but were never sent from here: send the "
                "version of the policy that acted"
            )
            raise SessionError(Code.UNKNOWN_VERSION, text, recording.seq)
        if version < versions.get(recording.environment, version):
            text = f"environment {recording.environment}: older weights acted than before"
            raise SessionError(Code.OUT_OF_ORDER, text, recording.seq)
        versions[recording.environment] = version
