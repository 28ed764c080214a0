"""A network between processes of one host, with faults on request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import struct
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

_CHUNK = 1 << 14  # bytes
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s: closing sends a RST


class Network:
    """Carries TCP connections over loopback; `link` gives an address."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._up = {"there": asyncio.Event(), "back": asyncio.Event()}
        # Of each connection: the link that it goes through, and both of its ends.
        self._open: dict[asyncio.Task[None], tuple[str, tuple[asyncio.StreamWriter, ...]]] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        self.heal()

    def link(self, address: str) -> str:
        """Another address, "127.0.0.1:port", that leads to `address`."""

        async def connected(near: asyncio.StreamReader, near_end: asyncio.StreamWriter) -> None:
            port = near_end.get_extra_info("sockname")[1]
            with contextlib.suppress(asyncio.CancelledError):  # by `close`
                await self._connect(near, near_end, f"127.0.0.1:{port}", address)

        server = self._do(asyncio.start_server(connected, "127.0.0.1"))
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def cut(self, *ways: str) -> None:
        """Let nothing through, not even the end of a connection.

        From the process that dialed ("there"), to it ("back"), or both."""
        for way in ways or self._up:
            self._loop.call_soon_threadsafe(self._up[way].clear)

    def heal(self) -> None:
        """What was under way goes on."""
        for up in self._up.values():
            self._loop.call_soon_threadsafe(up.set)

    def break_one(self, link: str, draws: random.Random) -> None:
        """Reset a connection of this link at both ends, if any."""

        async def reset() -> None:
            ends_of = [ends for through, ends in self._open.values() if through == link]
            for end in draws.choice(ends_of) if ends_of else ():
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.transport.abort()

        self._do(reset())

    def close(self) -> None:
        async def end() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    # -- on the loop ----------------------------------------------------------------------------

    async def _connect(
        self, near: asyncio.StreamReader, near_end: asyncio.StreamWriter, link: str, address: str
    ) -> None:
        for up in self._up.values():
            await up.wait()
        host, _, port = address.rpartition(":")
        try:
            far, far_end = await asyncio.open_connection(host, int(port))
        except OSError:
            near_end.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = (link, (near_end, far_end))
        ways = [
            asyncio.create_task(self._carry(near, far_end, "there")),
            asyncio.create_task(self._carry(far, near_end, "back")),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._open[task]
            for way in ways:
                way.cancel()
            for end in (near_end, far_end):
                end.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        """One way of a connection, to its end."""
        with contextlib.suppress(OSError):
            data = b"-"
            while data:
                try:
                    data = await reader.read(_CHUNK)
                except OSError:
                    data = b""
                await self._up[way].wait()
                writer.write(data)
                await writer.drain()


def free_address() -> str:
    """An address without a listener, outside of the kernel's own range."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"
