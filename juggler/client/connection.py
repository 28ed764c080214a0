"""The stream of a session, which is opened again when it breaks."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import grpc

from juggler.client.spaces import Values
from juggler.runtime.wire.v1 import simulator_pb2 as pb

PROTOCOL = 1
_METHOD = "/juggler.simulator.v1.Simulator/Session"
_MESSAGE_BYTES = 64 << 20
_OPTIONS = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    # A cut network is noticed within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # A stream that breaks is opened again here. With grpcio 1.85.1, one that gRPC itself opens
    # again, because the gateway has not taken it, may hang or lose a message.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Each session of a process has a connection of its own.
    ("grpc.use_local_subchannel_pool", 1),
]
_RETRY_SECONDS = 0.2
_GOODBYE_SECONDS = 5.0  # time for the gateway to take note
_LINE_SECONDS = 10.0
_TOO_LARGE = "message larger than max"  # in gRPC's words
_LOG = logging.getLogger(__name__)
#: Statuses that another attempt may get past.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


class GatewayError(RuntimeError):
    """The gateway refused something, or is gone. The text says what to do.

    Attributes:
        code: the name of an `Error.Code` of simulator.proto, or of a gRPC status.
        retryable: whether another session may succeed later.
    """

    def __init__(self, code: str, text: str, retryable: bool = False) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.retryable = code, retryable


class Connection:
    """A connection to a gateway.

    Args:
        address: "host:port" of the gateway.
        hello: the simulator's description of itself.
        token: the token of the run; None: the one in JUGGLER_TOKEN, if there is one.
        tls: a directory with ca.pem, cert.pem and key.pem; None: the one in JUGGLER_TLS, else no
            TLS.
        timeout: how many seconds to wait for the gateway's first answer.

    Attributes:
        info_names: names of the numbers that steps may tell.
        welcome: the gateway's first message.

    Raises:
        GatewayError: the gateway does not answer, or refuses this simulator.
        ValueError: the address is malformed.
    """

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        token: str | None = None,
        tls: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not re.fullmatch(r"unix:.+|.+:\d+", address):
            raise ValueError(
                f"{address!r} is not an address: must be HOST:PORT, as in 127.0.0.1:5005"
            )
        self._address, self._hello = address, hello
        self.info_names = list(hello.info_names)
        token = os.environ.get("JUGGLER_TOKEN", "") if token is None else token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._tls = tls or os.environ.get("JUGGLER_TLS", "")
        self._channel: Any = None
        self.welcome = self._dial(time.monotonic() + timeout)
        self._hello.resume_token = self.welcome.resume_token

    def exchange(self, steps: pb.StepBatch) -> pb.ActionBatch:
        """Send a batch of steps, and wait for the actions.

        Raises:
            GatewayError: the session is over.
        """
        message = pb.FromSimulator(steps=steps)
        self.send(message)
        while True:
            answer = self.hear([message])
            if answer.WhichOneof("message") == "actions" and answer.actions.seq == steps.seq:
                return answer.actions

    def send(self, message: pb.FromSimulator) -> None:
        self._outgoing.put(message)

    def hear(self, unanswered: Iterable[pb.FromSimulator]) -> pb.ToSimulator:
        """Wait for the next message.

        Args:
            unanswered: messages to send again if the connection breaks.

        Raises:
            GatewayError: the session is over.
        """
        while True:
            try:
                return self._next()
            except grpc.RpcError as caught:
                broken = caught
            self._resume(broken)
            for message in unanswered:
                self.send(message)

    def close(self) -> None:
        """Say goodbye."""
        self._outgoing.put(pb.FromSimulator(goodbye=pb.Goodbye()))
        self._outgoing.put(None)
        try:
            with _within(_GOODBYE_SECONDS, self._answers):
                for _ in self._answers:
                    pass
        except (grpc.RpcError, ValueError):
            pass  # the gateway is gone already, or hangs
        self._hang_up()

    def _next(self) -> pb.ToSimulator:
        try:
            answer: pb.ToSimulator | None = next(self._answers, None)
        except ValueError:  # the channel was closed
            raise _Ended from None
        if answer is None:
            raise _Ended
        if answer.HasField("notice"):
            _LOG.info("%s", answer.notice.text)
        if answer.HasField("error"):
            error = answer.error
            raise GatewayError(pb.Error.Code.Name(error.code), error.message, error.retryable)
        return answer

    def _resume(self, error: grpc.RpcError) -> None:
        if not isinstance(error, _Ended) and _code(error) not in _BROKEN:
            raise _told(error, self._address) from None
        self.welcome = self._dial(time.monotonic() + self.welcome.resume_seconds)

    def _dial(self, deadline: float) -> pb.Welcome:
        """Open a stream, with as many attempts as it takes."""
        told, said = None, time.monotonic()
        try:
            while True:
                try:
                    return self._open(deadline)
                except grpc.RpcError as error:
                    broken = isinstance(error, _Ended) or _code(error) in _BROKEN
                    # An attempt that was cut off tells less than the one before it.
                    if told is None or _code(error) is not grpc.StatusCode.CANCELLED:
                        told = _told(error, self._address)
                    now = time.monotonic()
                    if not broken or now >= deadline:
                        raise told from None
                if now - said > _LINE_SECONDS:
                    said = now
                    _LOG.warning("still trying, for another %.0f s: %s", deadline - now, told)
                time.sleep(_RETRY_SECONDS)
        except BaseException:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._outgoing.put(None)  # else a thread of gRPC waits for more
            self._channel.close()

    def _open(self, deadline: float) -> pb.Welcome:
        self._hang_up()
        self._channel = _channel(self._address, self._tls)
        self._outgoing: queue.SimpleQueue[pb.FromSimulator | None] = queue.SimpleQueue()
        self._outgoing.put(pb.FromSimulator(hello=self._hello))
        method = self._channel.stream_stream(
            _METHOD,
            request_serializer=pb.FromSimulator.SerializeToString,
            response_deserializer=pb.ToSimulator.FromString,
        )
        outgoing: Iterator[pb.FromSimulator | None] = iter(self._outgoing.get, None)
        self._answers = method(outgoing, metadata=self._metadata)
        with _within(deadline - time.monotonic(), self._answers):
            answer = self._next()
        if answer.WhichOneof("message") != "welcome":
            raise GatewayError("BAD_MESSAGE", "the gateway's first message was no welcome")
        return answer.welcome


class AnySession:
    """A session with a gateway, as a context manager. If the connection breaks, the session
    continues over another one, provided that it is made within `welcome.resume_seconds`.

    Args:
        connection: the session's connection.

    Attributes:
        welcome: the gateway's first message, a `Welcome` of simulator.proto.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._seq = 0
        self.welcome = connection.welcome

    def close(self) -> None:
        """Say goodbye. Running episodes end as truncated."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self.close()


class OneAgentSession(AnySession):
    """A session of a simulator with one agent.

    Args:
        connection: the session's connection.
        observations: values of the simulator's observations.
        actions: values of its actions.
        environments: N; None: one environment, without a dimension for it.
    """

    def __init__(
        self,
        connection: Connection,
        observations: Values,
        actions: Values,
        environments: int | None,
    ) -> None:
        super().__init__(connection)
        self._observations, self._actions = observations, actions
        self._count = environments


class _Ended(grpc.RpcError):
    """The gateway ended the stream without a message."""


@contextmanager
def _within(seconds: float, call: Any) -> Iterator[None]:
    """Cancels a call that takes longer."""
    overdue = threading.Timer(max(0.0, seconds), call.cancel)
    overdue.daemon = True
    overdue.start()
    try:
        yield
    finally:
        overdue.cancel()


def _code(error: Any) -> Any:
    return error.code() if hasattr(error, "code") else None


def _told(error: Any, address: str) -> GatewayError:
    if isinstance(error, _Ended):
        return GatewayError("UNAVAILABLE", f"the gateway at {address} ended the stream", True)
    if error.code() is grpc.StatusCode.CANCELLED:
        text = f"the gateway at {address} does not answer. Is the address right, or does it hang?"
        return GatewayError("DEADLINE_EXCEEDED", text, True)
    text = f"the gateway at {address}: {error.details()}"
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        text += ". Does it run, is the address right, and do both sides use TLS or neither?"
    if _TOO_LARGE in text:
        text += ". Send fewer environments or steps in one message, or smaller observations"
    return GatewayError(error.code().name, text, error.code() in _BROKEN)


def _channel(address: str, tls: str) -> Any:
    if not tls:
        return grpc.insecure_channel(address, options=_OPTIONS)
    ca, certificate, key = (Path(tls, n).read_bytes() for n in ("ca.pem", "cert.pem", "key.pem"))
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.secure_channel(address, credentials, options=_OPTIONS)
