"""Simulators at a gateway, compared with a bare gRPC echo of the same bytes.

The gateway acts with CartPole's policy and discards its batches. The simulators are coroutines of
one process, which send the same observations again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import psutil
from commands import machine, table
from google.protobuf.internal.encoder import _VarintBytes  # protobuf writes messages whole
from gymnasium import spaces

from juggler.client.space_values import Values
from juggler.envrunner.sampling_worker import numpy_in_one_thread
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.module_player import ModulePlayer
from juggler.gateway.session_manager import GatewaySettings
from juggler.gateway.sessions import AgentInterface
from juggler.gateway.transport import Transport
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb

OBSERVED = spaces.Box(-np.inf, np.inf, (4,), np.float32)
ACTED = spaces.Discrete(2)
METHOD = "/juggler.simulator.v1.Simulator/Session"
ROWS, STEPS = 1024, 32
#: Sessions, and environments of each.
SHAPES = ((1, 1), (16, 1), (64, 1), (256, 1), (16, 64))
STREAMS_PER_CHANNEL = 64
IDLE = 1000


class Waste:
    """Requests as many samples as possible, and discards them."""

    def prepare(self, module_id: str, agents: int, interface: AgentInterface) -> ModulePlayer:
        connectors, to_env = build_runner_pipelines(ConnectorsConfig.parse({}), *interface.spaces)
        module = build_module(ModuleConfig().module, *interface.spaces, {})
        policy = Actor(module, 1, 0, 0, to_env, connectors)
        self.player = ModulePlayer(interface, policy, STEPS, row_age=3)
        return self.player

    def wanted(self, module_id: str) -> int:
        return 1 << 30

    def report_line(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        if warning:
            print(text, file=sys.stderr)

    def after_turn(self) -> None:
        while hasattr(self, "player") and len(self.player.rows.complete) >= ROWS:
            self.player.pop_batch(ROWS)


def _fail(error: BaseException) -> None:
    """Show the error, and end the process: the benchmark then fails at once."""
    traceback.print_exception(error)
    os._exit(1)


def gateway(pipe: Connection, max_wait: float) -> None:
    """A gateway in a process of its own."""
    import torch

    torch.set_num_threads(1)  # as in workers
    numpy_in_one_thread()
    settings = GatewaySettings(1024, max_wait, "benchmark", STEPS)
    server = GatewayServer(Transport(""), Waste(), settings, _fail)
    pipe.send(server.start("127.0.0.1:0", None, False))
    pipe.recv()
    server.close("done")


def echo(pipe: Connection, _: float) -> None:
    """A process that answers each message with as many bytes as a gateway."""
    asyncio.run(_echo(pipe))


async def _echo(pipe: Connection) -> None:
    async def session(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message[: reply_bytes(message)])

    def reply_bytes(message: bytes) -> int:
        rows = max(1, len(message) // 20)
        return 50 + 8 * rows

    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", 1024)])
    handler = grpc.stream_stream_rpc_method_handler(session)
    service, method = METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    pipe.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    await server.stop(0)


class Simulators:
    """Sessions of this process."""

    def __init__(self, address: str, sessions: int, environments: int, greet: bool) -> None:
        self._address, self._count, self._environments = address, sessions, environments
        self._greet = greet
        shown = np.random.default_rng(0).normal(size=(environments, 4)).astype(np.float32)
        rows = pb.Rows(observations=Values(space_to_message(OBSERVED)).tensors(shown))
        rows.rewards.extend([1.0] * environments)
        self._rows = rows.SerializeToString()
        self.calls: list[Any] = []
        self._channels: list[Any] = []

    async def connect(self) -> None:
        agent = pb.Agent(
            observation_space=space_to_message(OBSERVED), action_space=space_to_message(ACTED)
        )
        hello = pb.Hello(
            protocol_min=1,
            protocol_max=1,
            mode=pb.REMOTE_INFERENCE,
            environments=self._environments,
            agents=[agent],
        )
        said = pb.FromSimulator(hello=hello).SerializeToString()
        for at in range(self._count):
            if at % STREAMS_PER_CHANNEL == 0:
                options = [("grpc.use_local_subchannel_pool", 1)]
                self._channels.append(grpc.aio.insecure_channel(self._address, options))
            call = self._channels[-1].stream_stream(METHOD)()
            if self._greet:
                await call.write(said)
                welcome = pb.ToSimulator.FromString(await call.read())
                assert welcome.HasField("welcome"), welcome
            self.calls.append(call)

    async def step(self, at: int, seq: int) -> None:
        batch = b"\x08" + _VarintBytes(seq) + b"\x12" + _VarintBytes(len(self._rows)) + self._rows
        call = self.calls[at]
        await call.write(b"\x12" + _VarintBytes(len(batch)) + batch)
        answer = await call.read()
        if seq == 1 and self._greet:
            assert pb.ToSimulator.FromString(answer).HasField("actions"), answer

    async def play(self, seconds: float) -> list[float]:
        """Step as fast as possible; returns the latencies of all batches of steps."""
        latencies: list[float] = []
        over = time.perf_counter() + seconds

        async def one(at: int) -> None:
            seq = 0
            while (began := time.perf_counter()) < over:
                seq += 1
                await self.step(at, seq)
                latencies.append(time.perf_counter() - began)

        await asyncio.gather(*(one(at) for at in range(self._count)))
        return latencies

    async def close(self) -> None:
        for call in self.calls:
            call.cancel()
        for channel in self._channels:
            await channel.close()


class Server:
    """A context with a serving process."""

    def __init__(self, target: Any, max_wait: float = 0.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, max_wait))
        self.process.start()
        self.address = self._pipe.recv()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self.process.join(10)

    @property
    def megabytes(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6


async def measure(server: Server, shape: tuple[int, int], seconds: float, greet: bool) -> Any:
    simulators = Simulators(server.address, *shape, greet)
    await simulators.connect()
    latencies = np.array(await simulators.play(seconds)) * 1e3
    await simulators.close()
    p50, p99 = np.percentile(latencies, (50, 99))
    return {"steps_per_second": len(latencies) * shape[1] / seconds, "p50": p50, "p99": p99}


def compare(shape: tuple[int, int], seconds: float, rounds: int, max_wait: float) -> Any:
    """Medians of the echo and the gateway, in turns because other work may run."""
    results: dict[str, list[dict[str, float]]] = {"echo": [], "gateway": []}
    with Server(echo) as bare, Server(gateway, max_wait) as ours:
        for _ in range(rounds):
            for name, server in (("echo", bare), ("gateway", ours)):
                greet = name == "gateway"
                results[name].append(asyncio.run(measure(server, shape, seconds / rounds, greet)))
    shares = [
        each["steps_per_second"] / beside["steps_per_second"]
        for each, beside in zip(results["gateway"], results["echo"], strict=True)
    ]
    medians = {
        name: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for name, each in results.items()
    }
    return {**medians, "share": statistics.median(shares), "shares": shares}


async def measure_idle(server: Server, count: int, seconds: float) -> dict[str, float]:
    one = Simulators(server.address, 1, 1, True)
    await one.connect()
    alone = np.array(await one.play(seconds)) * 1e3
    await one.close()
    before = server.megabytes
    idle = Simulators(server.address, count, 1, True)
    began = time.perf_counter()
    await idle.connect()
    connected = time.perf_counter() - began
    for at in range(count):
        await idle.step(at, 1)
    after = server.megabytes
    beside = Simulators(server.address, 1, 1, True)
    await beside.connect()
    latencies = np.array(await beside.play(seconds)) * 1e3
    await beside.close()
    await idle.close()
    return {
        "kilobytes": (after - before) * 1e3 / count,
        "megabytes": after,
        "connect_ms": connected / count * 1e3,
        "alone_p50": float(np.percentile(alone, 50)),
        "beside_p50": float(np.percentile(latencies, 50)),
        "beside_p99": float(np.percentile(latencies, 99)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each of the two in all")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-wait-ms", type=float, default=0.0)
    parser.add_argument("--shapes", default=",".join(f"{s}x{e}" for s, e in SHAPES))
    parser.add_argument("--idle", type=int, default=IDLE)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows, results = [], {}
    for shape in given.shapes.split(","):
        sessions, _, environments = shape.partition("x")
        each = (int(sessions), int(environments))
        found = compare(each, given.seconds, given.rounds, given.max_wait_ms / 1e3)
        results[shape] = found
        ours, bare, shares = found["gateway"], found["echo"], found["shares"]
        rows.append(
            [
                f"{each[0]} × {each[1]}",
                f"{ours['steps_per_second']:,.0f}",
                f"{bare['steps_per_second']:,.0f}",
                f"{found['share']:.0%} ({min(shares):.0%} - {max(shares):.0%})",
                *(f"{ours[p]:.2f} / {bare[p]:.2f}" for p in ("p50", "p99")),
            ]
        )
        print(*rows[-1], file=sys.stderr)
    head = ["sessions × environments", "steps/s", "echo", "share", "p50 ms / echo", "p99 ms / echo"]
    print(machine())
    print(table("Simulators at a gateway", head, rows))
    if given.idle:
        with Server(gateway) as server:
            idle = asyncio.run(measure_idle(server, given.idle, given.seconds / 2))
        results["idle"] = idle
        print(
            f"{given.idle} idle sessions: {idle['kilobytes']:.0f} KB each ({idle['megabytes']:.0f} "
            f"MB in all), {idle['connect_ms']:.2f} ms to connect one; another one's steps take "
            f"{idle['beside_p50']:.2f} ms beside them (p99 {idle['beside_p99']:.2f}), "
            f"{idle['alone_p50']:.2f} without"
        )
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
