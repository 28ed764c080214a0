"""The two ends of a stream on gRPC's core: messages are taken in the thread that hears of them.

On its public API, grpcio hands each message over to another thread and waits for its answer, at
both ends and in both directions: a sixth of the cost of 256 KB. The core's names are not public.
Those used here have been the same from grpcio 1.66 to 1.85; `calls` finds out whether they work.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.public_calls import UNUSABLE, End

_PLAIN = 0  # flags of an operation
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_Event = Any  # of the core: an operation is done


class _Stream(ABC):
    """One end. It sends one message at a time: the next one when the last has left.

    Args:
        next_message: what to send now; None: nothing, until `wake`. It must not wait.
    """

    def __init__(self, next_message: Callable[[], bytes | None]) -> None:
        self._next_message = next_message
        self._lock = threading.Lock()  # for sending
        self._sending = False
        self._over = False  # nothing can be sent any more

    def wake(self) -> None:
        """There may be something to send. May be called in any thread.

        Raises:
            Exception: raised by `next_message`.
        """
        with self._lock:
            if not self._sending and not self._over:
                message = self._next_message()
                if message is not None:
                    send = cygrpc.SendMessageOperation(message, _PLAIN)
                    self._sending = self._start(send, self._left)

    def _left(self, event: _Event) -> None:
        with self._lock:
            self._sending = False
            self._over |= not event.success
        self.wake()

    @abstractmethod
    def _start(self, operation: Any, then: Callable[[_Event], None]) -> bool:
        """Start an operation, whose event is given to `then`. False: the core did not take it."""


class ServerStream(_Stream):
    """The server's end of a call, in place of the iterators of its handler.

    All streams of a server share its one thread: messages are taken there, and `next_message` is
    called there unless `wake` calls it.

    Args:
        requests: the handler's iterator, which is not used.
        context: of the call, which the handler has let in.
        next_message: what to send now; None: nothing, until `wake`. It must not wait. An exception
            in the server's thread cancels the call.
    """

    def __init__(
        self,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        next_message: Callable[[], bytes | None],
    ) -> None:
        super().__init__(next_message)
        self._error: BaseException | None = None  # raised in the server's thread
        self._context = context
        self._call = context._rpc_event.call  # type: ignore[attr-defined]
        self._received: Callable[[bytes], None] = _nothing
        self._taking = threading.Lock()
        self._listening = True  # in a moment
        self._closed = False
        self._done = threading.Event()
        if not context.add_callback(self._done.set):  # a server that stops tells nothing else
            self._done.set()
        context.send_initial_metadata(())  # at once: a client may wait for it

    def send(self) -> Iterator[bytes]:
        """Send what there is to send, beside the handler, which has nothing to yield."""
        self.wake()
        return iter(())

    def listen(self, received: Callable[[bytes], None]) -> Iterator[bytes]:
        """Wait until the client ends its side or is gone and nothing is left to send; the handler
        has nothing to yield.

        Args:
            received: takes each message, and must not wait. No message follows one over which it
                raises.

        Raises:
            BaseException: as `check`.
        """
        self._received = received
        self._listen()
        self._done.wait()
        with self._taking:
            self._received = _nothing
        self.check()
        return iter(())

    def close(self) -> None:
        """End `listen` once everything is sent, even if the client would say more."""
        with self._lock:
            self._closed = True
            if not self._sending:
                self._done.set()

    def check(self) -> None:
        """Raises:
        BaseException: raised by `received`, or by `next_message` in the server's thread.
        """
        try:
            if self._error is not None:
                raise self._error
        finally:
            self._error = None  # its traceback leads back here, and to what was received

    def _start(self, operation: Any, then: Callable[[_Event], None]) -> bool:
        def happens(event: _Event) -> tuple[None, tuple[()]]:
            try:
                then(event)
            except BaseException as error:  # would end the server's thread
                self._error = self._error or error
                self._context.cancel()
            with self._lock:
                if (self._closed or not self._listening) and not self._sending:
                    self._done.set()
            return None, ()  # nothing is left for grpcio to do

        return not self._call.start_server_batch((operation,), happens)

    def _listen(self) -> None:
        self._listening = True  # first, since the event may come before the core's answer
        if not self._start(cygrpc.ReceiveMessageOperation(_PLAIN), self._came):
            self._listening = False

    def _came(self, event: _Event) -> None:
        self._listening = False
        message = event.batch_operations[0].message()
        if message is None:
            return
        try:
            with self._taking:
                self._received(message)
        except BaseException as error:
            self._error = error
        else:
            self._listen()


class ClientStream(_Stream):
    """The client's end of a call, as `public_calls.ClientStream`; `next_message` is called in its
    thread, or in that of `wake`."""

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        metadata: CallMetadata,
        next_message: Callable[[], bytes | None],
        received: Callable[[bytes], None],
        ended: Callable[[End], None],
        name: str,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(next_message)
        self._received = received
        self._ended = ended
        self._answered = answered
        self._end = End("", grpc.StatusCode.UNKNOWN, ())
        self._due = 3  # events: those of the operations below
        status = cygrpc.ReceiveStatusOnClientOperation(_PLAIN)
        first = (
            ((cygrpc.SendInitialMetadataOperation(metadata, _PLAIN), status), self._closed),
            ((cygrpc.ReceiveInitialMetadataOperation(_PLAIN),), self._let_in),
            ((cygrpc.ReceiveMessageOperation(_PLAIN),), self._came),
        )
        flags, host, deadline = cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS, None, None
        core = channel._channel  # type: ignore[attr-defined]
        self._call = core.segregated_call(
            flags, method.encode(), host, deadline, metadata, None, first, None, None
        )
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _start(self, operation: Any, then: Callable[[_Event], None]) -> bool:
        taken: bool = self._call.operate((operation,), then)
        self._due += taken
        return taken

    def _run(self) -> None:
        try:
            self._hear()
        except BaseException:
            with self._lock:
                self._over = True
            self._received = _nothing
            self._call.cancel(cygrpc.StatusCode.cancelled, UNUSABLE)
            self._hear()  # of the end
            raise
        finally:
            self._ended(self._end)

    def _hear(self) -> None:
        while self._due:
            event = self._call.next_event()
            with self._lock:
                self._due -= 1
            event.tag(event)
            del event  # and its message

    def _let_in(self, _: _Event) -> None:
        self._answered()

    def _came(self, event: _Event) -> None:
        message = event.batch_operations[0].message()
        if message is not None:
            with self._lock:  # so that the next one can come meanwhile
                self._start(cygrpc.ReceiveMessageOperation(_PLAIN), self._came)
            self._received(message)

    def _closed(self, event: _Event) -> None:
        with self._lock:
            self._over = True
        status = event.batch_operations[1]
        code = _CODES.get(status.code(), grpc.StatusCode.UNKNOWN)
        failed = code is not grpc.StatusCode.OK
        why = (failed and (status.details() or f"gRPC's status {code}")) or ""
        self._end = End(why, code, tuple(status.trailing_metadata() or ()))


def _nothing(_: Any) -> None:
    """Do nothing."""
