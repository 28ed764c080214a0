"""Streams on gRPC's core: messages are taken and asked for in the thread that hears of them.

grpcio hands each message over to another thread, and waits for that one's answer, at both ends and
in both directions: a sixth of what 256 KB cost. The names of the core are not public. Those used
here have been the same from grpcio 1.66 to 1.85; this file and the gateway's transport alone know
them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from juggler.runtime.actors.credentials import CallMetadata

_PLAIN = 0  # flags of an operation
_Event = Any  # of the core: something that was started is done


class _Stream(ABC):
    """One end, which sends one message after the other: the next one when the last has left.

    Args:
        next_message: what to send now; None: nothing, until `wake`. It must not wait.
    """

    def __init__(self, next_message: Callable[[], bytes | None]) -> None:
        self._next_message = next_message
        self._lock = threading.Lock()  # of whoever sends
        self._sending = False
        self._over = False  # nothing can be sent any more

    def wake(self) -> None:
        """There may be something to send. In any thread.

        Raises:
            Exception: of `next_message`.
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
        """Whether the core took it; its event is given to `then`."""


class ServerStream(_Stream):
    """The server's end of a call, for a handler of a `grpc.server`, in place of its iterators.

    All streams of a server share its one thread: there messages are taken, and asked for where
    `wake` does not ask.

    Args:
        context: of the call, which the handler has let in.
        next_message: as for a stream. What it raises in the server's thread cancels the call.

    """

    def __init__(
        self, context: grpc.ServicerContext, next_message: Callable[[], bytes | None]
    ) -> None:
        super().__init__(next_message)
        self._error: BaseException | None = None  # what something raised in the server's thread
        self._context = context
        self._call = context._rpc_event.call  # type: ignore[attr-defined]
        self._received: Callable[[bytes], None] = _nothing
        self._taking = threading.Lock()
        self._listening = True  # in a moment
        self._done = threading.Event()
        if not context.add_callback(self._done.set):  # a server that stops tells nothing else
            self._done.set()
        context.send_initial_metadata(())

    def listen(self, received: Callable[[bytes], None]) -> None:
        """Until the client says no more, or is gone, and there is nothing more to send.

        Args:
            received: takes each message, and must not wait. What it raises is the last that comes.

        Raises:
            BaseException: as `check`.
        """
        self._received = received
        self._listen()
        self._done.wait()
        with self._taking:
            self._received = _nothing
        self.check()

    def check(self) -> None:
        """Raises:
        BaseException: what `received` raised, or `next_message` in the server's thread.
        """
        try:
            if self._error is not None:
                raise self._error
        finally:
            self._error = None  # whose traceback leads back here, and to what was received

    def _start(self, operation: Any, then: Callable[[_Event], None]) -> bool:
        def happens(event: _Event) -> tuple[None, tuple[()]]:
            try:
                then(event)
            except BaseException as error:  # would end the server's thread
                self._error = self._error or error
                self._context.cancel()
            with self._lock:
                if not self._listening and not self._sending:
                    self._done.set()
            return None, ()  # nothing of the server's own is done

        return not self._call.start_server_batch((operation,), happens)

    def _listen(self) -> None:
        self._listening = True  # before it is, as it may be over before the core has answered
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
    """The client's end of a call, with a thread that hears what comes. It opens at once, and fails
    where nobody can be reached.

    Args:
        channel: to the server.
        method: "/package.Service/Method".
        metadata: of the call.
        next_message: as for a stream; called in the thread, or in that of `wake`.
        received: takes each message, in the thread. What it raises ends the call.
        ended: called once, in the thread: why the call ended; "": the server ended it in order.
        name: of the thread.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        metadata: CallMetadata,
        next_message: Callable[[], bytes | None],
        received: Callable[[bytes], None],
        ended: Callable[[str], None],
        name: str,
    ) -> None:
        super().__init__(next_message)
        self._received = received
        self._ended = ended
        self._why = ""
        self._due = 3  # events, at first of these operations
        status = cygrpc.ReceiveStatusOnClientOperation(_PLAIN)
        first = (
            ((cygrpc.SendInitialMetadataOperation(metadata, _PLAIN), status), self._closed),
            ((cygrpc.ReceiveInitialMetadataOperation(_PLAIN),), _nothing),
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
            self._call.cancel(cygrpc.StatusCode.cancelled, "what came could not be used")
            self._hear()  # the end
            raise
        finally:
            self._ended(self._why)

    def _hear(self) -> None:
        while self._due:
            event = self._call.next_event()
            with self._lock:
                self._due -= 1
            event.tag(event)
            del event  # and its message

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
        if status.code() != cygrpc.StatusCode.ok:
            self._why = status.details() or f"gRPC's status {status.code()}"


def _nothing(_: Any) -> None:
    """Where there is nothing to do."""
