"""Simulators that serve dm_env_rpc, as a vector of Gymnasium environments."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.options import SimulatorOptions, addresses
from juggler.envrunner.dm_env_rpc.tensors import (
    MAX_MESSAGE_BYTES,
    SimulatorError,
    WorldInterface,
    setting,
)
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.actors.credentials import CallMetadata, bearer, read_token
from juggler.runtime.actors.endpoints import why_not_secure
from juggler.runtime.actors.tls import Tls, read_tls
from juggler.runtime.wire.structures import from_tree, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Path, flatten

T = TypeVar("T")

METHOD: Final = "/dm_env_rpc.v1.Environment/Process"
# No keepalive: gRPC's servers hang up on clients that send more of it than they expect, and every
# reply has a deadline.
OPTIONS: Final = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_BACKOFF_SECONDS: Final = (0.1, 2.0)  # the first, which doubles, and the maximum
_PROGRESS_SECONDS: Final = 5.0
_FAREWELL_SECONDS: Final = 2.0
_CLOSING_SECONDS: Final = 10.0
#: Maximum number of sequences in a row that end in their first reply.
_MOST_EMPTY: Final = 8
#: Loops of closed vectors, for reuse. gRPC has events for a loop even after its calls have ended; a
#: closed loop would raise in the loop that reads them.
_idle_loops: list[asyncio.AbstractEventLoop] = []


class WorldStream:
    """A stream to a simulator, and its world there.

    All coroutines run in one event loop, one at a time.

    Args:
        index: of the environment in its EnvRunner.
        address: of the simulator, as "host:port" or "unix:path".
        deadline: seconds that a reply may take.
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
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None
        self._created: str | None = None  # name of the world that this agent has created
        self._ended = True  # the next step begins a sequence, without actions
        self.interface: WorldInterface  # the specs in use; set by `join`

    async def join(self) -> None:
        """Dial until the simulator answers, and join its world.

        Raises:
            SimulatorError: it did not answer for connect_seconds, refused, or has specs that cannot
                be used.
        """
        started = reported = time.monotonic()
        pause, longest = _BACKOFF_SECONDS
        while True:
            try:
                return await self._join()
            except SimulatorError as error:
                await self.leave()
                if not error.unavailable:
                    raise
                # A simulator may start after the run, or restart during it.
                spent = time.monotonic() - started
                if spent + pause > self._options.connect_seconds:
                    # It dials once more and blocks, so it runs in a thread.
                    own = self.address, "simulator", self._tls
                    raise SimulatorError(
                        await asyncio.to_thread(why_not_secure, *own)
                        or f"no simulator answers at {self.address} (tried for {spent:.0f} s: "
                        f"{error}). Is it running, is the address right, and can this host reach "
                        "it? env_kwargs.connect_seconds says how long to try"
                    ) from None
                # At once, and then every few seconds.
                late = spent < pause or time.monotonic() - reported > _PROGRESS_SECONDS
                if late and self._index == 0:  # one line for all agents of an EnvRunner
                    reported = time.monotonic()
                    print(
                        f"juggler: no simulator at {self.address} yet: {error}; trying for "
                        f"{self._options.connect_seconds - spent:.0f} s",
                        file=sys.stderr,
                    )
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def begin(self, seed: int | None, into: Mapping[Path, Any]) -> None:
        """Begin a sequence, and copy its first observations into this agent's row.

        Args:
            into: arrays [N, ...] by their paths.

        Raises:
            SimulatorError: the simulator failed, or its reply does not fit its specs.
        """
        if seed is not None or not self._ended:
            request = pb.EnvironmentRequest()
            request.reset.SetInParent()
            if seed is not None:
                _settle(request.reset.settings, {self._options.seed_setting: seed}, "seed_setting")
            response = await self._ask(request)
            self.interface = self.interface.adopt(response.reset.specs)
            self._ended = True
        await self.step({}, into)

    async def step(
        self, actions: Mapping[Path, Any], into: Mapping[Path, Any]
    ) -> tuple[bool, bool, list[float]]:
        """Take a step; it begins a sequence after `join` or an end.

        Args:
            actions: of all environments [N, ...], by their paths; not used in a first step.
            into: arrays [N, ...] for observations, by their paths.

        Returns:
            terminated, truncated, and the signals: reward, and discount if there is one.

        Raises:
            SimulatorError: the simulator failed, or its reply does not fit its specs.
        """
        first = self._ended
        for _ in range(_MOST_EMPTY):
            request = pb.EnvironmentRequest()
            self.interface.write_request(None if first else actions, self._index, request.step)
            step = (await self._ask(request)).step
            if step.state not in (pb.RUNNING, pb.TERMINATED, pb.INTERRUPTED):
                raise SimulatorError(f"its reply to step has the state {step.state}, which is none")
            if first and step.state != pb.RUNNING:
                continue  # the sequence ended before an action was possible
            self._ended = step.state != pb.RUNNING
            signals = self.interface.read_reply(step, self._index, into)
            return step.state == pb.TERMINATED, step.state == pb.INTERRUPTED, signals
        raise SimulatorError(f"{_MOST_EMPTY} sequences in a row ended in their first reply")

    async def leave(self) -> None:
        """Leave the world, destroy it if it is this agent's, disconnect.

        Never raises.
        """
        if self._channel is None:
            return
        requests = [pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest())]
        if self._created is not None:
            destroy = pb.DestroyWorldRequest(world_name=self._created)
            requests.append(pb.EnvironmentRequest(destroy_world=destroy))
        with contextlib.suppress(SimulatorError):
            for request in requests:
                await self._ask(request, _FAREWELL_SECONDS)
        self._call.cancel()
        await self._channel.close(None)
        self._channel = self._created = None

    async def _join(self) -> None:
        if self._tls is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=OPTIONS)
        else:
            credentials = self._tls.channel_credentials()
            self._channel = grpc.aio.secure_channel(self.address, credentials, options=OPTIONS)
        # Bytes are parsed here, so that an invalid message raises our own error.
        self._call = self._channel.stream_stream(METHOD)(metadata=self._metadata or None)
        world = self._options.world
        if world is None:
            world = self._created = await self._create()
        join = pb.EnvironmentRequest()
        join.join_world.world_name = world.replace("{index}", str(self._index))
        _settle(join.join_world.settings, self._options.join_world, "join_world")
        response = await self._ask(join)
        self.interface = WorldInterface.of(response.join_world.specs, self._options)
        self._ended = True

    async def _create(self) -> str:
        create = pb.EnvironmentRequest()
        create.create_world.SetInParent()
        _settle(create.create_world.settings, self._options.create_world, "create_world")
        try:
            return (await self._ask(create)).create_world.world_name
        except SimulatorError as error:
            if error.refused and self._index > 0:
                error.args = (
                    f"{error}. Environment 0 has a world: if the server makes no more, set "
                    "envs_per_runner = 1 and num_env_runners = 1, or name several servers",
                )
            raise

    async def _ask(
        self, request: pb.EnvironmentRequest, deadline: float | None = None
    ) -> pb.EnvironmentResponse:
        """Send a request, and return the reply."""
        if self._channel is None:
            raise SimulatorError("it has been left")
        kind, seconds = request.WhichOneof("payload"), deadline or self._deadline
        try:
            async with asyncio.timeout(seconds):
                await self._call.write(request.SerializeToString())
                reply = await self._call.read()
        except TimeoutError:
            raise SimulatorError(
                f"no reply to {kind} within {seconds:g} s: it hangs, or is slower than "
                "step_deadline_seconds allows"
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            raise await self._lost() from None
        # The end of a stream may also be its server's normal end.
        if reply is grpc.aio.EOF:
            raise await self._lost()
        try:
            response = pb.EnvironmentResponse.FromString(reply)
        except DecodeError:
            raise SimulatorError(
                f"the reply to {kind} is no message of dm_env_rpc v1 ({len(reply)} bytes, from "
                f"{reply[:16].hex(' ')}): is another service there?"
            ) from None
        # Each request has exactly one reply, in order.
        answer = response.WhichOneof("payload")
        if answer == "error":
            code = response.error.code
            names = {each.value[0]: each.name for each in grpc.StatusCode}
            what = f"{names.get(code, f'code {code}')}: {response.error.message[:2000]}"
            raise SimulatorError(f"the simulator refused {kind}: {what}", refused=True)
        if answer != kind:
            raise SimulatorError(
                f"the reply to {kind} is one to {answer or 'nothing'}: the server has lost the "
                "order, or has another protocol"
            )
        return response

    async def _lost(self) -> SimulatorError:
        """Return the error that ended the stream."""
        if not self._call.done():
            self._call.cancel()
        code, details = await self._call.code(), await self._call.details()
        text = (details or "").partition("\n")[0][:500]
        if code is grpc.StatusCode.OK:
            return SimulatorError("the simulator hung up", unavailable=True)
        # gRPC does not know how a stream ended if it is written to afterwards.
        unknown = code is grpc.StatusCode.INTERNAL and text == "Internal error from Core"
        if "message larger than max" in text:  # gRPC's wording
            text += (
                ". Leave tensors out with env_kwargs.observations, or raise the limit of the "
                "simulator's gRPC server (grpc.max_receive_message_length and "
                f"grpc.max_send_message_length); Juggler's own is {MAX_MESSAGE_BYTES >> 20} MiB"
            )
        return SimulatorError(
            f"the stream to the simulator broke: {code.name}: {text}",
            unavailable=unknown or code is grpc.StatusCode.UNAVAILABLE,
        )


def _settle(settings: Any, values: Mapping[str, Any], key: str) -> None:
    for name, value in values.items():
        try:
            settings[name].CopyFrom(setting(value))
        except SimulatorError as error:
            raise SimulatorError(f"env_kwargs.{key}: {name}: {error}") from None


class SimulatorVector(VectorEnv[Any, Any, Any]):
    """N agents, each on its own stream.

    All requests are sent before any reply is read.

    The step after the end of an episode begins the next one (NEXT_STEP), as in the protocol, so
    that every step takes one round trip. Observations share memory, and are valid until the next
    step. `reset` with a seed gives agent i seed + i, if simulators take seeds (seed_setting).

    Args:
        where: "host:port" or "unix:path" of each server; all EnvRunners together dial them in turn.
        count: N.

    Raises:
        EnvironmentFailed: here, or in `reset` and `step`: a simulator cannot be reached, refused,
            hung, died, or sent something invalid. All worlds have been left then.
        ValueError: certificates or a token cannot be read.
    """

    def __init__(
        self,
        where: Sequence[str],
        options: SimulatorOptions,
        count: int,
        deadline: float,
        runner: int = 0,
    ) -> None:
        # The run's own credentials are for its own processes. Simulators have separate ones.
        tls = read_tls(options.tls) if options.tls else None
        token = read_token(options.token_file or None, tls) if tls or options.token_file else ""
        metadata = bearer(token) if token else ()
        self._agents = [
            WorldStream(
                i, where[(runner * count + i) % len(where)], options, deadline, tls, metadata
            )
            for i in range(count)
        ]
        self._seeded = bool(options.seed_setting)
        # Runs only while a reply is awaited.
        self._loop = _idle_loops.pop() if _idle_loops else asyncio.new_event_loop()
        self.num_envs = count
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = None
        self.closed = False
        try:
            self._together("constructor", lambda agent: agent.join())
            self._have_one_interface()
        except BaseException:
            self.close()
            raise
        # Steps copy replies into these arrays, and allocate nothing.
        interface = self._agents[0].interface
        self.single_observation_space = interface.observations.space
        self.single_action_space = interface.actions.space
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        tree = zeros(self.single_observation_space, (count,))  # [N, ...]
        self._arrays = dict(flatten(tree))  # [N, ...] by path
        self._observations = from_tree(self.single_observation_space, tree)
        self._signals = np.zeros((count, len(interface.signals.specs)))  # [N, 1 or 2]

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a sequence in every environment, and abandon running ones."""
        if not self._seeded or seed is None:
            seeds: list[int | None] = [None] * self.num_envs
        elif isinstance(seed, int):
            seeds = [(seed + i) % 2**31 for i in range(self.num_envs)]
        else:
            seeds = seed
        each = dict(zip(self._agents, seeds, strict=True))
        self._together("reset", lambda agent: agent.begin(each[agent], self._arrays))
        return self._observations, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        tree = tree_map(np.asarray, to_tree(self.single_action_space, actions))  # [N, ...]
        chosen = dict(flatten(tree))
        replies = self._together("step", lambda agent: agent.step(chosen, self._arrays))
        ends: NDArray[np.bool_] = np.array([reply[:2] for reply in replies])  # [N, 2]
        self._signals[:] = [reply[2] for reply in replies]
        infos = {"discount": self._signals[:, 1]} if self._signals.shape[1] > 1 else {}
        return self._observations, self._signals[:, 0], ends[:, 0], ends[:, 1], infos

    def close_extras(self, **kwargs: Any) -> None:
        """Leave all worlds, and destroy created ones, within a few seconds."""

        async def leave() -> None:
            async with asyncio.timeout(_CLOSING_SECONDS):
                leaving = (agent.leave() for agent in self._agents)
                await asyncio.gather(*leaving, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            self._run(leave())
        _idle_loops.append(self._loop)

    def _together(self, call: str, ask: Callable[[WorldStream], Coroutine[Any, Any, T]]) -> list[T]:
        """Call all agents at the same time, and return their answers."""

        async def all_of_them() -> list[T | BaseException]:
            return await asyncio.gather(*map(ask, self._agents), return_exceptions=True)

        answers: list[T] = []
        for index, answer in enumerate(self._run(all_of_them())):
            if isinstance(answer, SimulatorError):
                raise self._failure(index, call, str(answer))
            if isinstance(answer, BaseException):
                raise answer
            answers.append(answer)
        return answers

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(work)
        # The caller is in an event loop, as in a notebook, and a thread runs one at a time.
        with ThreadPoolExecutor(1) as other_thread:
            return other_thread.submit(self._loop.run_until_complete, work).result()

    def _have_one_interface(self) -> None:
        first, *others = self._agents
        for index, agent in enumerate(others, 1):
            mine, theirs = agent.interface, first.interface
            for what, a, b in (
                ("observations", mine.observations.space, theirs.observations.space),
                ("actions", mine.actions.space, theirs.actions.space),
                ("signals", mine.signals.paths, theirs.signals.paths),
            ):
                if a != b:
                    reason = f"its {what} are {a}, and those of environment 0 are {b}"
                    raise self._failure(index, "constructor", reason)

    def _failure(self, index: int, call: str, reason: str) -> EnvironmentFailed:
        where = f"environment {index} (dm_env_rpc://{self._agents[index].address})"
        return EnvironmentFailed(where, call, reason, passing=call != "constructor")


def simulators(config: EnvRunnerConfig, runner: int = 0) -> SimulatorVector:
    """Make the environments of a configuration whose `env` is dm_env_rpc://…

    Raises:
        EnvironmentFailed: a simulator cannot be used.
        ValueError: the configuration has a value that does not fit simulators.
    """
    if config.vectorize not in ("auto", "native"):
        raise ValueError(
            f"vectorize = {config.vectorize!r}: simulators run elsewhere; use auto or native"
        )
    return SimulatorVector(
        addresses(config.env),
        SimulatorOptions.parse(config.env_kwargs).of_runner(runner),
        config.envs_per_runner,
        config.step_deadline_seconds,
        runner,
    )
