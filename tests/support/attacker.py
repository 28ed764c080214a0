"""A client without the token that opens calls, and sits there: a program, and who starts it.

    python attacker.py ADDRESS KIND CONNECTIONS

KIND is watch (of health), check (of health, without its request) or attach (without its hello). It
prints a line once all calls were made, makes those again that end, and leaves when its stdin ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

_CALLS = 16  # on each connection, the most that a server takes
_BEGUN_SECONDS = 1.0  # of a call that nobody answers
_AGAIN_SECONDS = 10.0
METHODS = {
    "watch": "/grpc.health.v1.Health/Watch",
    "check": "/grpc.health.v1.Health/Check",
    "attach": "/juggler.v1.Driver/Attach",
}


@contextmanager
def attacker(address: str, kind: str, connections: int) -> Iterator[None]:
    """It has made its calls, and makes them again where they end."""
    process = subprocess.Popen(
        [sys.executable, __file__, address, kind, str(connections)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "all calls were made\n"
            yield
            assert process.poll() is None
        finally:
            process.kill()


async def main(address: str, kind: str, connections: int) -> None:
    os.nice(10)  # strangers do not take the cores of the machine that they attack
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(connections)]
    begun: list[asyncio.Event] = []
    sits = []
    for channel in channels:
        await channel.channel_ready()
    for channel in channels:
        for _ in range(_CALLS):
            begun.append(asyncio.Event())
            sits.append(asyncio.ensure_future(_sit(channel, kind, begun[-1])))
    for event in begun:
        await event.wait()
    print("all calls were made", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for each in sits:
        each.cancel()
    for channel in channels:
        await channel.close()


async def _sit(channel: grpc.aio.Channel, kind: str, begun: asyncio.Event) -> None:
    while True:
        call = channel.stream_stream(METHODS[kind])()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the server has ended it
            if kind == "watch":
                await call.write(health_pb2.HealthCheckRequest().SerializeToString())
            # That it is there, or that it may well be: one without a request is answered nothing.
            answer = asyncio.ensure_future(call.read())
            answer.add_done_callback(lambda read: read.cancelled() or read.exception())
            await asyncio.wait([answer], timeout=_BEGUN_SECONDS)
            begun.set()
            await call.wait_for_connection()
            await call.code()
        begun.set()
        await asyncio.sleep(random.uniform(0.5, 1.5) * _AGAIN_SECONDS)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
