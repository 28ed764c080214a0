"""Both ends of a stream on grpcio's public API, with a deadline.

grpcio hands each message to another thread, and each end needs its own thread for incoming
messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from threading import Timer
from typing import NamedTuple

import grpc

from juggler.runtime.actors.credentials import CallMetadata

#: Longer than gRPC tries to connect (20 s), so that gRPC can report a reason, and shorter than an
#: EnvRunner waits for its first weights (30 s).
FIRST_ANSWER_SECONDS = 25.0


class FirstAnswer:
    """Closes the channel of a call unless the server answers in time.

    A server of this package sends its initial metadata as soon as it has admitted a call.

    Attributes:
        why_not: why the channel was closed; "": an answer came, or may still come.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self.why_not = ""
        self._channel = channel
        timer = Timer(FIRST_ANSWER_SECONDS, self._give_up)
        timer.daemon = True
        timer.start()
        #: Notes that the server has answered, or the call has ended.
        self.answered = timer.cancel

    def _give_up(self) -> None:
        self.why_not = f"the learner gave no answer for {FIRST_ANSWER_SECONDS:.0f} s"
        self._channel.close()


#: Reason for a call that its own client ended.
UNUSABLE = "a message could not be used"


class CallEnd(NamedTuple):
    """End of a call, for its client.

    Attributes:
        why: for people; "" if the server ended it normally.
        code: gRPC's.
        metadata: the server's trailing metadata.
        unanswered: the server gave no answer in time, and the channel was closed. A proxy's status
            DEADLINE_EXCEEDED is an answer.
    """

    why: str
    code: grpc.StatusCode
    metadata: CallMetadata
    unanswered: bool = False


class ClientStream:
    """The client's end of a call, with a thread that reads.

    It opens at once, and fails if the server cannot be reached.

    Args:
        channel: to the server.
        method: "/package.Service/Method".
        metadata: of the call.
        next_message: returns the next message; None: nothing, until `wake`. It must not wait.
        received: called with each message, in the thread. An exception ends the call.
        ended: called once, in the thread, with the end of the call.
        name: of the thread.
        must_answer: the channel is closed unless the server answers in time.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        metadata: CallMetadata,
        next_message: Callable[[], bytes | None],
        received: Callable[[bytes], None],
        ended: Callable[[CallEnd], None],
        name: str,
        must_answer: bool = False,
    ) -> None:
        self._next_message = next_message
        self._received, self._ended = received, ended
        self.close = channel.close  # ends the call
        self._timed = channel if must_answer else None
        self._changed = threading.Condition()
        self._woken = self._over = False
        self._error: BaseException | None = None  # raised by `next_message`
        talk: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        with self._changed:
            self._call = talk(self._messages(), metadata=metadata)
        if not self._call.add_callback(self._ends):
            self._ends()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wake(self) -> None:
        """Check for messages to send; may be called in any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def _messages(self) -> Iterator[bytes]:
        """Yield messages to a thread of grpcio."""
        while not self._over:
            try:
                message = self._next_message()
            except BaseException as error:
                self._error = error
                with self._changed:
                    call = self._call  # which may just have been created
                call.cancel()
                return
            if message is not None:
                yield message
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._woken or self._over)
                self._woken = False

    def _run(self) -> None:
        why, first = "", None
        try:
            # Here, so that no timer is left when this thread cannot be started.
            first = None if self._timed is None else FirstAnswer(self._timed)
            self._call.initial_metadata()  # waits for it
            if first is not None:
                first.answered()
            for message in self._call:
                self._received(message)
        except grpc.RpcError:
            why = self._call.details() or f"gRPC's status {self._call.code()}"
        except BaseException as error:
            self._error = error
            self._call.cancel()
        # gRPC would only report that this end cancelled the call.
        why = why if self._error is None else UNUSABLE
        end = CallEnd(why, self._call.code(), tuple(self._call.trailing_metadata() or ()))
        if first is not None:
            first.answered()
            if first.why_not:
                end = end._replace(why=first.why_not, unanswered=True)
        self._ended(end)
        if self._error is not None:
            raise self._error

    def _ends(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
