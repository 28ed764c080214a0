"""One stream to a server of dm_env_rpc."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.tls import Tls

METHOD: Final = "/dm_env_rpc.v1.Environment/Process"
#: Of one message: observations may be images.
MAX_MESSAGE_BYTES: Final = 256 << 20
_TOO_LARGE: Final = "message larger than max"  # in gRPC's words

# No keepalive: gRPC's servers hang up on those who send more of it than they were told to expect,
# and every reply has a deadline.
OPTIONS: Final = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class SimulatorError(Exception):
    """A simulator did not do as requested; the message says why.

    Attributes:
        unavailable: it was not there, or is gone; dialling again may help.
    """

    def __init__(self, message: str, *, unavailable: bool = False) -> None:
        super().__init__(message)
        self.unavailable = unavailable


class SimulatorRefused(SimulatorError):
    """The simulator answered with an error of its own.

    Attributes:
        code: of google.rpc.Code.
        text: in its words.
    """

    def __init__(self, request: str, code: int, text: str) -> None:
        super().__init__(f"the simulator refused {request}: {_code_name(code)}: {text[:2000]}")
        self.code = code
        self.text = text


class Connection:
    """Sends requests, and reads a reply to each. Made and used in one running event loop.

    Args:
        address: "host:port" or "unix:path".
        tls: of this host; None: without.
        metadata: what the call shows.
    """

    def __init__(self, address: str, tls: Tls | None = None, metadata: CallMetadata = ()) -> None:
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            credentials = tls.channel_credentials()
            self._channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        # Bytes, which are parsed here: what is no message is then an error of ours.
        self._call: Any = self._channel.stream_stream(METHOD)(metadata=metadata or None)

    async def send(
        self, *requests: pb.EnvironmentRequest, deadline: float
    ) -> list[pb.EnvironmentResponse]:
        """The replies to requests, which all go out before any of them is read.

        Args:
            requests: of any kind.
            deadline: seconds until the last reply must be there.

        Raises:
            SimulatorRefused: the reply to one is an error.
            SimulatorError: there is no valid reply in time.
        """
        kinds = [request.WhichOneof("payload") or "nothing" for request in requests]
        try:
            async with asyncio.timeout(deadline):
                for request in requests:
                    await self._call.write(request.SerializeToString())
                raw = [await self._call.read() for _ in requests]
        except TimeoutError:
            raise SimulatorError(
                f"no reply to {' and '.join(kinds)} within {deadline:g} s: it hangs, or is slower "
                "than step_deadline_seconds allows"
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            raise await self._lost() from None
        if any(reply is grpc.aio.EOF for reply in raw):
            raise await self._lost()
        return [_checked(kind, reply) for kind, reply in zip(kinds, raw, strict=True)]

    async def close(self) -> None:
        """Ends the stream. Never raises, and waits for nobody."""
        self._call.cancel()
        await self._channel.close(None)

    async def _lost(self) -> SimulatorError:
        """The error that the stream ended with."""
        if not self._call.done():
            self._call.cancel()
        code, details = await self._call.code(), await self._call.details()
        text = (details or "").partition("\n")[0][:500]
        if code is grpc.StatusCode.OK:
            return SimulatorError("the simulator hung up", unavailable=True)
        # gRPC does not know how a stream ended that is written to afterwards.
        unknown = code is grpc.StatusCode.INTERNAL and text == "Internal error from Core"
        if _TOO_LARGE in text:
            text += (
                ". Leave tensors out with env_kwargs.observations, or raise the limit of the "
                "simulator's gRPC server (grpc.max_receive_message_length and "
                f"grpc.max_send_message_length); Juggler's own is {MAX_MESSAGE_BYTES >> 20} MiB"
            )
        return SimulatorError(
            f"the stream to the simulator broke: {code.name}: {text}",
            unavailable=unknown or code is grpc.StatusCode.UNAVAILABLE,
        )


def _checked(kind: str, reply: bytes) -> pb.EnvironmentResponse:
    try:
        response = pb.EnvironmentResponse.FromString(reply)
    except DecodeError:
        raise SimulatorError(
            f"the reply to {kind} is no message of dm_env_rpc v1 ({len(reply)} bytes, from "
            f"{reply[:16].hex(' ')}): is another service there?"
        ) from None
    answer = response.WhichOneof("payload")
    if answer == "error":
        raise SimulatorRefused(kind, response.error.code, response.error.message)
    if answer != kind:
        raise SimulatorError(
            f"the reply to {kind} is one to {answer or 'nothing'}: the server has lost the order, "
            "or has another protocol"
        )
    return response


def _code_name(number: int) -> str:
    names: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
    return names.get(number, f"code {number}")
