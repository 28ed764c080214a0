"""Fake runners and learners, which send the messages of real ones after latencies set by a script.

They attach over real gRPC streams, all in one asyncio loop, so that one core can hold hundreds of
them. Batches are only ids, which a fake runner hands to its fake learner within the process.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from juggler.runtime.actors.endpoints import CHANNEL_OPTIONS, PROTOCOL_VERSION
from juggler.runtime.actors.hub import ATTACH_METHOD
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import attach_pb2, spaces_pb2, tensors_pb2, training_pb2

ROWS, STEPS = 64, 32  # of every batch
LIVE_STEPS = ROWS * STEPS
ENDED = 4  # episodes, in every batch
SECONDS = dict.fromkeys(("waiting", "environment", "inference", "connectors", "frames"), 1 / 3)
SPACE = spaces_pb2.Space(discrete=spaces_pb2.DiscreteSpace(n=2, dtype=tensors_pb2.DTYPE_INT64))


@dataclass(frozen=True, kw_only=True)
class Script:
    """The number of workers, and their latencies.

    Attributes:
        sample_ms: median time for one batch; 0: none at all.
        update_ms: median time for one update of all learners together.
        jitter: standard deviation of the logarithm of either time.
        slow_every: every n-th runner is slower; 0: none is.
        slow: how many times as long that takes.
    """

    runners: int
    learners: int
    sample_ms: float = 0.0
    update_ms: float = 0.0
    jitter: float = 0.2
    slow_every: int = 0
    slow: float = 4.0

    def slowness(self, runner: int) -> float:
        is_slow = self.slow_every and runner % self.slow_every == self.slow_every - 1
        return self.slow if is_slow else 1.0


#: By runner's index: when each request came, and for how long there had been room for it.
Waits = dict[int, list[tuple[float, float]]]


def run_fakes(address: str, script: Script, waits: Any) -> None:
    """Run in a process of its own until the driver ends the run; puts `Waits` into `waits`."""
    asyncio.run(_all_of_them(address, script, waits))


async def _all_of_them(address: str, script: Script, waits: Any) -> None:
    group = FakeGroup(script)
    learners = {f"learner-{n}": FakeLearner(n, group) for n in range(script.learners)}
    runners = [FakeRunner(n, script, learners) for n in range(script.runners)]
    await asyncio.gather(*(worker.attach(address) for worker in [*learners.values(), *runners]))
    waits.put({runner.index: runner.waits for runner in runners})


def receipt_for(request: training_pb2.SampleRequest) -> training_pb2.Receipt:
    """The receipt of a successful sample request, as long as a real one."""
    return training_pb2.Receipt(
        module_id=request.module_id,
        batch_id=request.batch_id,
        learner=request.learner,
        live_steps=LIVE_STEPS,
        version=request.at_least,
        episode_returns=[500.0] * ENDED,
        episode_lengths=[500] * ENDED,
        seconds=SECONDS,
    )


class FakeWorker:
    """The worker's end of an attach stream: answers to commands, and a heartbeat each second."""

    role = ""

    def __init__(self, index: int) -> None:
        self.index = index
        self._outgoing = attach_pb2.FromWorker()  # messages that wait are sent together
        self._wake = asyncio.Event()

    async def attach(self, address: str) -> None:
        """Stay until the driver ends the stream."""
        try:
            await self._attach(address)
        except* (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the stream ended during a write

    async def _attach(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(
                ATTACH_METHOD,
                request_serializer=attach_pb2.FromWorker.SerializeToString,
                response_deserializer=attach_pb2.ToWorker.FromString,
            )()
            hello = attach_pb2.Hello(
                role=self.role,
                index=self.index,
                incarnation=secrets.token_hex(8),
                protocol_version=PROTOCOL_VERSION,
            )
            await call.write(attach_pb2.FromWorker(hello=hello))
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(each) for each in (self._write(call), *self.tasks())]
                while message := await call.read():
                    for command in message.commands:
                        self._carry_out(command)
                for task in beside:
                    task.cancel()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Work beside the stream."""
        return [self._beat()]

    def on(self, command_id: int, name: str, command: attach_pb2.Command) -> None:
        """Carry out a command that is specific to the role."""
        self.reply(command_id, attach_pb2.Done())

    def reply(self, command_id: int, body: Message) -> None:
        reply = self._outgoing.replies.add(id=command_id, last=True)
        reply.body.Pack(body)
        self._wake.set()

    def report(self, body: Message) -> None:
        self._outgoing.reports.add().Pack(body)
        self._wake.set()

    def _carry_out(self, command: attach_pb2.Command) -> None:
        name = command.body.TypeName()
        if name == "juggler.v1.Setup":
            ready = training_pb2.Ready(
                modules=[
                    training_pb2.Ready.Module(
                        module_id="default",
                        observation_space=SPACE,
                        action_space=SPACE,
                        rows=ROWS,
                        steps=STEPS,
                    )
                ]
            )
            self.reply(command.id, ready)
        elif name == "juggler.v1.Stop":
            self._outgoing.farewell.reason = "told to stop"
            self._wake.set()
        else:
            self.on(command.id, name, command)

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            message, self._outgoing = self._outgoing, attach_pb2.FromWorker()
            await call.write(message)

    async def _beat(self) -> None:
        await asyncio.sleep(random.random())  # real workers do not all begin at once
        while True:
            self._outgoing.heartbeat.resident_bytes = 200 << 20
            self._wake.set()
            await asyncio.sleep(1.0)


class FakeRunner(FakeWorker):
    """Serves one request after the other.

    Attributes:
        waits: of each request, when it came and for how long there had been room for it.
    """

    role = "envrunner"

    def __init__(self, index: int, script: Script, learners: dict[str, FakeLearner]) -> None:
        super().__init__(index)
        self.waits: list[tuple[float, float]] = []
        self._learners = learners
        self._seconds = script.sample_ms * script.slowness(index) / 1e3
        self._jitter = script.jitter
        self._random = random.Random(index)
        self._told: set[str] = set()  # the present learners
        self._room_since: deque[float] = deque()  # of receipts without a next request
        self._requests: asyncio.Queue[tuple[int, training_pb2.SampleRequest]] = asyncio.Queue()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().tasks(), self._serve()]

    def on(self, command_id: int, name: str, command: attach_pb2.Command) -> None:
        if name == "juggler.v1.SampleRequest":
            request = training_pb2.SampleRequest.FromString(command.body.value)
            if self._room_since:  # otherwise it is one of the first
                now = time.monotonic()
                self.waits.append((now, now - self._room_since.popleft()))
            self._requests.put_nowait((command_id, request))
            return
        if name == "juggler.v1.Learners":
            message = training_pb2.Learners.FromString(command.body.value)
            self._told = {learner.worker_id for learner in message.learners}
        super().on(command_id, name, command)

    async def _serve(self) -> None:
        while True:
            command_id, request = await self._requests.get()
            # Even without a latency the stream gets its turn: no runner answers two at once.
            await asyncio.sleep(self._seconds * self._random.lognormvariate(0.0, self._jitter))
            self._finish(command_id, request)

    def _finish(self, command_id: int, request: training_pb2.SampleRequest) -> None:
        if request.learner not in self._told:
            raise ValueError(f"a batch for {request.learner}, which it was not told of")
        self._learners[request.learner].take(request.batch_id)
        self.reply(command_id, receipt_for(request))
        self._room_since.append(time.monotonic())


class FakeGroup:
    """Joins the learners' updates: all begin when the last rank can, and end together."""

    def __init__(self, script: Script) -> None:
        self._seconds = script.update_ms / 1e3
        self._jitter = script.jitter
        self._barrier = asyncio.Barrier(script.learners)

    async def update(self, update_id: int) -> None:
        await self._barrier.wait()
        if self._seconds:
            jitter = random.Random(update_id).lognormvariate(0.0, self._jitter)
            await asyncio.sleep(self._seconds * jitter)


class FakeLearner(FakeWorker):
    """Holds batches, and uses them in updates."""

    role = "learner"

    def __init__(self, index: int, group: FakeGroup) -> None:
        super().__init__(index)
        self._group = group
        self._held: set[int] = set()
        self._version = training_pb2.WeightsVersion()
        self._trained = 0
        self._updates: asyncio.Queue[tuple[int, training_pb2.Update]] = asyncio.Queue()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().tasks(), self._train()]

    def take(self, batch_id: int) -> None:
        """A batch has arrived."""
        self._held.add(batch_id)
        arrival = training_pb2.Arrival(batch_id=batch_id, live_steps=LIVE_STEPS)
        self.report(training_pb2.Arrivals(module_id="default", arrivals=[arrival]))

    def on(self, command_id: int, name: str, command: attach_pb2.Command) -> None:
        if name == "juggler.v1.Update":
            update = training_pb2.Update.FromString(command.body.value)
            self._updates.put_nowait((command_id, update))
        elif name == "juggler.v1.AddModule":
            added = training_pb2.AddModule.FromString(command.body.value)
            ready = training_pb2.ModuleReady(module_id=added.module_id, meeting_point="host:1")
            self.reply(command_id, ready)
        elif name == "juggler.v1.Snapshot":
            header = training_pb2.StateHeader(version=self._version, extra="{}")
            tree = {"default": {"weight": np.zeros(1, np.float32)}}
            (chunk,) = encode_frame(header, tree, digest=True)
            self.reply(command_id, training_pb2.StateChunk.FromString(chunk))
        elif name == "juggler.v1.Group":
            group = training_pb2.Group.FromString(command.body.value)
            self._version.generation = group.generation
            formed = training_pb2.GroupFormed(
                module_id=group.module_id,
                generation=group.generation,
                update=self._version.update,
                state_hash=1,
            )
            self.reply(command_id, formed)
        else:
            super().on(command_id, name, command)

    async def _train(self) -> None:
        while True:
            command_id, update = await self._updates.get()
            await self._group.update(update.update_id)
            for batch_id in update.batch_ids:
                self._held.remove(batch_id)  # a KeyError if it never came
            self._version.update += 1
            self._trained += LIVE_STEPS * len(update.batch_ids)
            used = [
                training_pb2.UsedBatch(batch_id=batch_id, live_steps=LIVE_STEPS)
                for batch_id in update.batch_ids
            ]
            done = training_pb2.UpdateDone(
                module_id=update.module_id,
                update_id=update.update_id,
                version=self._version,
                batches=used,
                steps_trained=self._trained,
            )
            self.reply(command_id, done)
