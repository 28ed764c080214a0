"""The stream of a session, which is reopened when it breaks."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import grpc

from juggler.runtime.wire.v1 import simulator_pb2 as pb

_METHOD = "/juggler.simulator.v1.Simulator/Session"
_MESSAGE_BYTES = 64 << 20
_OPTIONS = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    # A cut network is detected within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # Broken streams are reopened here. With grpcio 1.85.1, a stream that gRPC itself reopens,
    # because the gateway has not accepted it, may hang or lose a message.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Each session of a process has its own connection.
    ("grpc.use_local_subchannel_pool", 1),
]
_RETRY_SECONDS = 0.2
_GOODBYE_SECONDS = 5.0  # for the gateway to process a goodbye
_LINE_SECONDS = 10.0
_TOO_LARGE = "message larger than max"  # in gRPC's words
_LOG = logging.getLogger(__name__)
#: Statuses after which another attempt may succeed. Calls have no deadline here: a proxy has.
_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class GatewayError(RuntimeError):
    """A gateway refused a simulator, or did not answer.

    The text includes the remedy.

    Attributes:
        code: name of an `Error.Code` of simulator.proto, or of a gRPC status.
        retryable: whether another session may succeed later.
    """

    def __init__(self, code: str, text: str, retryable: bool = False) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.retryable = code, retryable


class GatewayConnection:
    """A session with a gateway, as a context manager.

    If the stream breaks, the session continues over a new stream, if that opens within
    `welcome.resume_seconds`.

    Args:
        hello: the simulator's description of itself.
        address, token, tls, timeout: as in `connect`.

    Attributes:
        welcome: the stream's first message from the gateway, a `Welcome` of simulator.proto.
        parameters: the run's `simulator_parameters` for new episodes, by name.

    Raises:
        GatewayError: the gateway does not answer, or refuses this simulator.
        ValueError: the address is malformed.
    """

    def __init__(
        self, hello: pb.Hello, address: str, token: str | None, tls: str | None, timeout: float
    ) -> None:
        if not re.fullmatch(r"unix:.+|.+:\d+", address):
            raise ValueError(
                f"{address!r} is not an address: must be HOST:PORT, as in 127.0.0.1:5005"
            )
        self._address, self._hello = address, hello
        token = os.environ.get("JUGGLER_TOKEN", "") if token is None else token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._tls = tls or os.environ.get("JUGGLER_TLS", "")
        self._channel: Any = None
        self._seq = 0
        # Messages to send again if the stream breaks, by number; 0: a request for a policy.
        self._unanswered: dict[int, pb.FromSimulator] = {}
        self._begun = [0] * hello.environments  # episodes
        self.parameters: dict[str, float] = {}
        self.welcome = self._dial(timeout)
        hello.resume_token = self.welcome.resume_token

    def next_seed(self, environment: int = 0) -> int | None:
        """Return the seed of an environment's next episode.

        Each call is for another episode. None: the gateway has an earlier version.
        """
        if not self.welcome.HasField("seed"):
            return None
        number = len(self._begun) * self._begun[environment] + environment
        self._begun[environment] += 1
        return self.welcome.seed + number

    def close(self) -> None:
        """Say goodbye. Running episodes end as truncated."""
        self._send(pb.FromSimulator(goodbye=pb.Goodbye()))
        self._outgoing.put(None)
        # The gateway may have ended, or may hang.
        with suppress(grpc.RpcError, ValueError), _within(_GOODBYE_SECONDS, self._answers):
            for _ in self._answers:
                pass
        self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self.close()

    def _exchange(
        self, agents: Iterable[pb.Rows], continuing: Iterable[int] = (), idle: float = 0.0
    ) -> pb.ActionBatch:
        """Send a batch of steps, and wait for the actions.

        Args:
            continuing: environments whose episodes continue.
            idle: rewards of agents that never acted in the episode that ends in environment 0.
        """
        self._seq += 1
        steps = pb.StepBatch(seq=self._seq, agents=agents, continuing=continuing)
        if idle:
            steps.idle_rewards[0] = idle
        self._send(pb.FromSimulator(steps=steps), self._seq)
        # An interrupt must not leave a step for which `flush` would wait.
        try:
            while True:
                answer = self._receive()
                if answer.WhichOneof("message") == "actions" and answer.actions.seq == self._seq:
                    return answer.actions
        finally:
            self._unanswered.pop(self._seq, None)

    def _send(self, message: pb.FromSimulator, number: int | None = None) -> None:
        """Send a message, which has an answer if it has a number."""
        if number is not None:
            self._unanswered[number] = message
        self._outgoing.put(message)

    def _receive(self) -> pb.ToSimulator:
        """Wait for the next message."""
        while True:
            try:
                return self._next()
            except grpc.RpcError as error:
                if error.code() not in _BROKEN:
                    raise _as_failure(error, self._address) from None
            self.welcome = self._dial(self.welcome.resume_seconds)
            for message in self._unanswered.values():
                self._send(message)

    def _next(self) -> pb.ToSimulator:
        answer: pb.ToSimulator | None = None
        with suppress(ValueError):  # the channel was closed
            answer = next(self._answers, None)
        if answer is None:
            raise _Ended
        if answer.HasField("notice"):
            _LOG.info("%s", answer.notice.text)
        if answer.HasField("error"):
            self._unanswered.clear()  # the session has ended
            error = answer.error
            raise GatewayError(pb.Error.Code.Name(error.code), error.message, error.retryable)
        for part in (answer.actions, answer.recorded, answer.welcome):
            if part.parameters:  # empty in messages of another kind
                self.parameters = dict(part.parameters)
        return answer

    def _dial(self, seconds: float) -> pb.Welcome:
        """Open a stream, with repeated attempts for these seconds."""
        logged = time.monotonic()
        deadline, failure = logged + seconds, None
        try:
            while True:
                try:
                    return self._open(deadline)
                except grpc.RpcError as error:
                    # The error of a cancelled attempt has no reason: keep the one before.
                    if failure is None or error.code() is not grpc.StatusCode.CANCELLED:
                        failure = _as_failure(error, self._address)
                    now = time.monotonic()
                    if error.code() not in _BROKEN or now >= deadline:
                        raise failure from None
                if now - logged > _LINE_SECONDS:
                    logged = now
                    _LOG.warning("still trying, for another %.0f s: %s", deadline - now, failure)
                time.sleep(_RETRY_SECONDS)
        except BaseException:
            self._disconnect()
            raise

    def _open(self, deadline: float) -> pb.Welcome:
        self._disconnect()
        # Both sides show a certificate of the run's own authority.
        if self._tls:
            names = ("ca.pem", "key.pem", "cert.pem")
            own = grpc.ssl_channel_credentials(*(Path(self._tls, n).read_bytes() for n in names))
            self._channel = grpc.secure_channel(self._address, own, options=_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(self._address, options=_OPTIONS)
        self._outgoing: queue.SimpleQueue[pb.FromSimulator | None] = queue.SimpleQueue()
        self._send(pb.FromSimulator(hello=self._hello))
        method = self._channel.stream_stream(
            _METHOD,
            request_serializer=pb.FromSimulator.SerializeToString,
            response_deserializer=pb.ToSimulator.FromString,
        )
        self._answers = method(iter(self._outgoing.get, None), metadata=self._metadata)
        # gRPC reports an unreachable gateway with the first answer.
        with _within(deadline - time.monotonic(), self._answers):
            answer = self._next()
        if answer.WhichOneof("message") != "welcome":
            raise GatewayError("BAD_MESSAGE", "the gateway's first message was no welcome")
        return answer.welcome

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._outgoing.put(None)  # ends the thread of gRPC that sends
            self._channel.close()


class _Ended(grpc.RpcError):
    """The gateway ended the stream without a message."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "it ended the stream"


@contextmanager
def _within(seconds: float, call: Any) -> Iterator[None]:
    """Cancel a call that takes longer."""
    overdue = threading.Timer(max(0.0, seconds), call.cancel)
    overdue.daemon = True
    overdue.start()
    try:
        yield
    finally:
        overdue.cancel()


def _as_failure(error: Any, address: str) -> GatewayError:
    """Convert an error of gRPC to a GatewayError with a remedy."""
    code, text = error.code(), f"the gateway at {address}: {error.details()}"
    if code is grpc.StatusCode.CANCELLED:
        text = f"the gateway at {address} does not answer. Is the address right, or does it hang?"
        return GatewayError("DEADLINE_EXCEEDED", text, True)
    if code is grpc.StatusCode.UNAVAILABLE:
        text += ". Does it run, is the address right, and do both sides use TLS or neither?"
    if _TOO_LARGE in text:
        text += ". Send fewer environments or steps in one message, or smaller observations"
    return GatewayError(code.name, text, code in _BROKEN)
