"""Finds receiver processes that stand still or hang: nothing else would end them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc

from juggler.runtime.actors.endpoints import dial
from juggler.runtime.actors.supervisor import Supervisor

#: No server has it, so that every server which lives refuses it at once.
_METHOD = "/juggler.v1.Episodes/Alive"
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 4.0
#: So often in a row. A single answer may be late because the whole host stood still.
_MOST_UNANSWERED = 3
_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class Pulse:
    """Calls each process every now and then, and kills one that has answered before and answers no
    more. Whoever supervises it starts it again.

    Args:
        supervisor: of the processes.
        addresses: a Unix socket of each process's server, by worker id.
        tell: gets a line for people when one is killed.
    """

    def __init__(
        self, supervisor: Supervisor, addresses: dict[str, str], tell: Callable[[str], None]
    ) -> None:
        self._supervisor, self._tell = supervisor, tell
        self._channels = {worker_id: dial(each) for worker_id, each in addresses.items()}
        self._alive: dict[str, Any] = {
            worker_id: each.unary_unary(_METHOD) for worker_id, each in self._channels.items()
        }
        self._answered: dict[str, int] = {}  # the process that did, by worker id
        self._unanswered: Counter[str] = Counter()  # calls in a row
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="receivers-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        for channel in self._channels.values():
            channel.close()  # ends calls under way
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            pids = self._supervisor.pids()
            try:
                calls = {
                    worker_id: self._alive[worker_id].future(b"", timeout=_ANSWER_SECONDS)
                    for worker_id in pids
                }
                answers = {worker_id: _answers(call) for worker_id, call in calls.items()}
            except (ValueError, grpc.FutureCancelledError):
                return  # `close` has closed the channels
            for worker_id, answers_now in answers.items():
                self._note(worker_id, pids[worker_id], answers_now)

    def _note(self, worker_id: str, pid: int, answers: bool) -> None:
        if answers:
            self._answered[worker_id] = pid
            self._unanswered[worker_id] = 0
        elif self._answered.get(worker_id) == pid:  # else it is still starting
            self._unanswered[worker_id] += 1
            if self._unanswered[worker_id] == _MOST_UNANSWERED:
                self._tell(f"kills its {worker_id}, which stands still or hangs: nothing answers")
                self._supervisor.kill(worker_id, pid, abort=True)


def _answers(call: Any) -> bool:
    """Whether a call was answered, with whatever; waits for that.

    Raises:
        grpc.FutureCancelledError: it was ended here.
    """
    call.exception()
    return call.code() not in _NO_ANSWER
