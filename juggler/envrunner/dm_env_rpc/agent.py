"""One agent in one world of a simulator: joins it, steps it and leaves it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from juggler.envrunner.dm_env_rpc.layout import Interface
from juggler.envrunner.dm_env_rpc.options import SimulatorOptions
from juggler.envrunner.dm_env_rpc.tensors import MAX_MESSAGE_BYTES, TensorError, setting
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.endpoints import why_not_secure
from juggler.runtime.actors.tls import Tls
from juggler.runtime.wire.trees import Path

METHOD: Final = "/dm_env_rpc.v1.Environment/Process"
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


_BACKOFF_SECONDS: Final = (0.1, 2.0)  # the first, which doubles, and the longest
_PROGRESS_SECONDS: Final = 5.0
_FAREWELL_SECONDS: Final = 2.0
#: Replies in a row that end a sequence before it has begun.
_MOST_EMPTY: Final = 8


class Agent:
    """A stream to a simulator, and the world that it made or joined there.

    All coroutines run in one event loop, one at a time.

    Args:
        index: of the environment in its EnvRunner.
        address: where the simulator is.
        options: how to join, and what to use there.
        deadline: seconds that a reply may take.
        tls: of this host; None: without.
        metadata: what the stream shows.

    Attributes:
        interface: the specs in use; set by `join`.
        over: the next step begins a sequence, without actions.
    """

    def __init__(
        self,
        index: int,
        address: str,
        options: SimulatorOptions,
        deadline: float,
        tls: Tls | None = None,
        metadata: CallMetadata = (),
    ) -> None:
        self._index, self.address, self._options = index, address, options
        self._deadline, self._tls, self._metadata = deadline, tls, metadata
        self._connection: Connection | None = None
        self._created: str | None = None  # a world of its own
        self.interface: Interface
        self.over = True

    async def join(self) -> None:
        """Dial until the simulator answers, and join its world.

        Raises:
            SimulatorError: it did not answer for connect_seconds, or refused.
            TensorError: its specs cannot be used.
        """
        started = said = time.monotonic()
        pause, longest = _BACKOFF_SECONDS
        while True:
            try:
                return await self._join()
            except SimulatorError as error:
                await self.leave()
                if not error.unavailable:
                    raise
                spent = time.monotonic() - started
                if spent + pause > self._options.connect_seconds:
                    raise await self._out_of_reach(error, spent) from None
                if spent < pause or time.monotonic() - said > _PROGRESS_SECONDS:
                    said = time.monotonic()
                    self._say(f"{error}; trying for {self._options.connect_seconds - spent:.0f} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def begin(self, seed: int | None, into: Mapping[Path, Any]) -> None:
        """Begin a sequence, and copy its first observations into this agent's row.

        Args:
            seed: for the setting of the simulator that takes one; None: there is none.
            into: arrays [N, ...] by their paths.

        Raises:
            SimulatorError: the simulator failed.
            TensorError: its reply does not fit its specs.
        """
        if seed is not None or not self.over:
            request = pb.EnvironmentRequest()
            request.reset.SetInParent()
            if seed is not None:
                _settle(request.reset.settings, {self._options.seed_setting: seed}, "seed_setting")
            (response,) = await self._send(request)
            self.interface = self.interface.adopt(response.reset.specs)
            self.over = True
        await self.step({}, into)

    async def step(
        self, actions: Mapping[Path, Any], into: Mapping[Path, Any]
    ) -> tuple[bool, bool, list[float]]:
        """One step, the first of a sequence after `join` or an end.

        Args:
            actions: of all environments [N, ...], by their paths; not used in a first step.
            into: where observations go, likewise.

        Returns:
            terminated, truncated, and the signals: reward, and discount if there is one.

        Raises:
            SimulatorError: the simulator failed.
            TensorError: its reply does not fit its specs.
        """
        first = self.over
        for _ in range(_MOST_EMPTY):
            request = pb.EnvironmentRequest()
            request.step.requested_observations.extend(self.interface.requested)
            if not first:
                self.interface.write_actions(actions, self._index, request.step)
            (response,) = await self._send(request)
            state = response.step.state
            if state not in (pb.RUNNING, pb.TERMINATED, pb.INTERRUPTED):
                raise SimulatorError(f"its reply to step has the state {state}, which is none")
            if first and state != pb.RUNNING:
                continue  # the sequence was over before an action was possible
            self.over = state != pb.RUNNING
            self.interface.read_observations(response.step, self._index, into)
            signals = self.interface.read_signals(response.step)
            return state == pb.TERMINATED, state == pb.INTERRUPTED, signals
        raise SimulatorError(f"{_MOST_EMPTY} sequences in a row ended in their first reply")

    async def leave(self) -> None:
        """Leave the world, destroy it if it was made for this agent, and hang up. Never raises."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        requests = [pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest())]
        if self._created is not None:
            destroy = pb.DestroyWorldRequest(world_name=self._created)
            requests.append(pb.EnvironmentRequest(destroy_world=destroy))
        self._created = None
        with contextlib.suppress(SimulatorError):
            await connection.send(*requests, deadline=_FAREWELL_SECONDS)
        await connection.close()

    # -- parts ----------------------------------------------------------------------------------

    async def _join(self) -> None:
        self._connection = Connection(self.address, self._tls, self._metadata)
        world = self._options.world
        if world is None:
            world = await self._create()
        join = pb.EnvironmentRequest()
        join.join_world.world_name = world.replace("{index}", str(self._index))
        _settle(join.join_world.settings, self._options.join_world, "join_world")
        (response,) = await self._send(join)
        self.interface = Interface.of(response.join_world.specs, self._options)
        self.over = True

    async def _create(self) -> str:
        create = pb.EnvironmentRequest()
        create.create_world.SetInParent()
        _settle(create.create_world.settings, self._options.create_world, "create_world")
        try:
            (response,) = await self._send(create)
        except SimulatorRefused as error:
            if self._index > 0:
                error.args = (
                    f"{error}. Environment 0 has a world: if the server makes no more, set "
                    "envs_per_runner = 1 and num_env_runners = 1, or name several servers",
                )
            raise
        self._created = response.create_world.world_name
        return self._created

    async def _send(self, *requests: pb.EnvironmentRequest) -> list[pb.EnvironmentResponse]:
        if self._connection is None:
            raise SimulatorError("it has been left")
        return await self._connection.send(*requests, deadline=self._deadline)

    async def _out_of_reach(self, error: SimulatorError, spent: float) -> SimulatorError:
        # It dials once more, in this thread's stead.
        refused = await asyncio.to_thread(why_not_secure, self.address, "simulator", self._tls)
        return SimulatorError(
            refused
            or f"no simulator answers at {self.address} (tried for {spent:.0f} s: {error}). Is it "
            "running, is the address right, and can this host reach it? env_kwargs.connect_seconds "
            "says how long to try"
        )

    def _say(self, text: str) -> None:
        if self._index == 0:  # one line for all of an EnvRunner's
            print(f"juggler: no simulator at {self.address} yet: {text}", file=sys.stderr)


def _settle(settings: Any, values: Mapping[str, Any], key: str) -> None:
    for name, value in values.items():
        try:
            settings[name].CopyFrom(setting(value))
        except TensorError as error:
            raise TensorError(f"env_kwargs.{key}: {name}: {error}") from None
