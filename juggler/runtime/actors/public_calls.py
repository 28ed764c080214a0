"""The two ends of a stream on grpcio's public API.

grpcio hands each message to another thread here, and each end needs a thread of its own for what
comes: slower than `core_calls`, and independent of names that are not public.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grpc

from juggler.runtime.actors.credentials import CallMetadata

#: Why a call ended that its own client gave up.
UNUSABLE = "what came could not be used"


class End(NamedTuple):
    """How a call ended, for its client.

    Attributes:
        why: for people; "" if the server ended it in order.
        code: gRPC's.
        metadata: that the server sent last.
    """

    why: str
    code: grpc.StatusCode
    metadata: CallMetadata


class ServerStream:
    """The server's end of a call: what its handler yields, and who is told what comes.

    Args:
        requests: the handler's iterator.
        context: of the call, which the handler has let in.
        next_message: what to send now; None: nothing, until `wake`. It must not wait.
    """

    def __init__(
        self,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        next_message: Callable[[], bytes | None],
    ) -> None:
        self._requests, self._context, self._next_message = requests, context, next_message
        self._changed = threading.Condition()
        self._woken = False
        self._listening = False
        self._error: BaseException | None = None  # raised by what takes messages
        self._gone = False
        self._closed = False
        if not context.add_callback(self._ends):
            self._gone = True
        context.send_initial_metadata(())  # at once: a client may wait for it

    def wake(self) -> None:
        """There may be something to send. May be called in any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def send(self) -> Iterator[bytes]:
        """What there is to send now, for the handler to yield."""
        yield from iter(self._next_message, None)

    def listen(
        self, received: Callable[[bytes], None], ended: Callable[[], None] | None = None
    ) -> Iterator[bytes]:
        """Messages for the handler to yield, until the client ends its side or is gone and nothing
        is left to send.

        Args:
            received: takes each message, in a thread of the stream. No message follows one over
                which it raises.
            ended: called in that thread when no message comes any more.

        Raises:
            BaseException: as `check`.
        """
        self._listening = True
        reader = threading.Thread(
            target=self._read, args=(received, ended), name="stream-reader", daemon=True
        )
        reader.start()
        try:
            yield from self._messages()
        except BaseException:  # also the exit of a generator whose call is over
            self._context.cancel()
            raise
        finally:
            if not self._closed:
                reader.join()  # the client said its last message, or the call is over
        self.check()

    def close(self) -> None:
        """End `listen` once everything is sent, even if the client would say more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def check(self) -> None:
        """Raises:
        BaseException: raised by `received`.
        """
        try:
            if self._error is not None:
                raise self._error
        finally:
            self._error = None  # its traceback leads back here

    def _messages(self) -> Iterator[bytes]:
        while not self._gone:
            with self._changed:
                self._woken, over = False, self._over()
            yield from self.send()
            if over:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._woken or self._over())

    def _over(self) -> bool:
        """Whether nothing more is to be sent than what there is."""
        return self._gone or self._closed or not self._listening

    def _read(self, received: Callable[[bytes], None], ended: Callable[[], None] | None) -> None:
        try:
            for message in self._requests:
                if self._closed:
                    return
                received(message)
        except grpc.RpcError:
            pass  # the client is gone
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._listening = False
                self._changed.notify()
            if ended is not None:
                ended()

    def _ends(self) -> None:
        with self._changed:
            self._gone = True
            self._changed.notify()


class ClientStream:
    """The client's end of a call, with a thread for what comes. It opens at once, and fails if the
    server cannot be reached.

    Args:
        channel: to the server.
        method: "/package.Service/Method".
        metadata: of the call.
        next_message: what to send now; None: nothing, until `wake`. It must not wait.
        received: takes each message, in the thread. An exception ends the call.
        ended: called once, in the thread, with how the call ended.
        name: of the thread.
        answered: called once, in the thread, before all that comes: the server has let the call in,
            or ended it.
    """

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
        self._next_message = next_message
        self._received, self._ended, self._answered = received, ended, answered
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
        """There may be something to send. May be called in any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def _messages(self) -> Iterator[bytes]:
        """Read by a thread of grpcio."""
        while not self._over:
            try:
                message = self._next_message()
            except BaseException as error:
                self._error = error
                with self._changed:
                    call = self._call  # which may only just have been made
                call.cancel()
                return
            if message is not None:
                yield message
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._woken or self._over)
                self._woken = False

    def _run(self) -> None:
        why = ""
        try:
            self._call.initial_metadata()  # waits for it
            self._answered()
            for message in self._call:
                self._received(message)
        except grpc.RpcError:
            why = self._call.details() or f"gRPC's status {self._call.code()}"
        except BaseException as error:
            self._error = error
            self._call.cancel()
        why = why if self._error is None else UNUSABLE
        self._ended(End(why, self._call.code(), tuple(self._call.trailing_metadata() or ())))
        if self._error is not None:
            raise self._error

    def _ends(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
