"""What simulators are told without an answer that is due: notices of simulator.proto."""

from __future__ import annotations

from collections.abc import Iterable

from juggler.gateway.sessions import Session
from juggler.gateway.shared_episodes import MOST_UNTOLD
from juggler.runtime.wire.v1 import simulator_pb2 as pb


def tell_to_wait(waiting: Iterable[Session]) -> None:
    """Tell simulators that have waited for long, each once until it gets an answer."""
    text = "nobody asks for samples now; answers come as soon as somebody does"
    for session in waiting:
        if session.stream is not None and not session.told_to_wait:
            session.stream.send(_notice(text))
            session.told_to_wait = True


def tell_of_untold(sessions: Iterable[Session]) -> None:
    """Tell simulators, each once, that not all of their episodes are counted."""
    text = f"nobody has asked for samples for long: of the episodes that ended, {MOST_UNTOLD:,}"
    for session in sessions:
        if session.stream is not None and not session.told_of_untold:
            session.stream.send(_notice(f"{text} are counted, the newest"))
            session.told_of_untold = True


def _notice(text: str) -> bytes:
    notice = pb.Notice(kind=pb.Notice.WAITING, text=text)
    return pb.ToSimulator(notice=notice).SerializeToString()
