"""The two ends of a stream: on gRPC's core where that works, else on grpcio's public API.

The core is faster, but its names are not public, and another version of grpcio may lack or change
them. So a process tries them once, on a call to itself, and takes the public API if they fail.
JUGGLER_GRPC=public takes it at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Protocol, cast

import grpc

from juggler.runtime.actors import public_calls
from juggler.runtime.actors.temporary import HeldDirectory

GRPC_VARIABLE = "JUGGLER_GRPC"
PUBLIC = "public"
#: For a call from this process to itself.
TRIAL_SECONDS = 10.0


class Calls(Protocol):
    """The two ends of a call; those of both APIs take the same arguments."""

    ServerStream: type[public_calls.ServerStream]
    ClientStream: type[public_calls.ClientStream]


def calls() -> Calls:
    """The ends that streams are to use in this process."""
    core = not public_was_asked_for() and not why_slow()
    return _core() if core else cast("Calls", public_calls)


def _core() -> Calls:
    return cast("Calls", import_module("juggler.runtime.actors.core_calls"))


def public_was_asked_for() -> bool:
    """Whether the environment says to use the public API alone.

    Raises:
        ValueError: it says something else.
    """
    said = os.environ.get(GRPC_VARIABLE, "")
    if said not in ("", PUBLIC):
        raise ValueError(f"{GRPC_VARIABLE}={said}: it may be {PUBLIC!r}, or not be set")
    return said == PUBLIC


def why_slow() -> str:
    """For people: why streams of this process cannot use gRPC's core; "": they can, or are not
    meant to."""
    return "" if public_was_asked_for() else _why_core_fails()


@cache
def _why_core_fails() -> str:
    return why_fails(_try)


def why_fails(trial: Callable[[], None]) -> str:
    """For people: why something that uses gRPC's core does not work; "": it does.

    Args:
        trial: tries it. If it hangs it is given up, with its thread.
    """
    errors: SimpleQueue[Exception | None] = SimpleQueue()

    def run() -> None:
        try:
            trial()
            errors.put(None)
        except Exception as error:
            errors.put(error)

    threading.Thread(target=run, name="grpc-trial", daemon=True).start()
    try:
        error = errors.get(timeout=3 * TRIAL_SECONDS)
    except Empty:
        error = TimeoutError("they hang")
    if error is None:
        return ""
    return (
        f"uses the public API of grpcio, which is slower: in grpcio {grpc.__version__} the "
        f"private names that it would use do not work ({type(error).__name__}: {error})"
    )


def _try() -> None:
    """Send a message over a call of this process to itself, and have it come back.

    Raises:
        Exception: it did not.
    """
    core = _core()

    def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        echoed: list[bytes] = []
        stream = core.ServerStream(requests, context, partial(_taken, echoed))

        def received(message: bytes) -> None:
            echoed.append(message)
            stream.wake()

        yield from stream.listen(received)

    unsent, said = [b"hello"], SimpleQueue[bytes | public_calls.End]()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(echo)
    threads = ThreadPoolExecutor(1)
    server = grpc.server(threads)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"E": handler}),))
    directory = HeldDirectory()
    address = f"unix:{directory.path}/grpc"
    try:
        server.add_insecure_port(address)
        server.start()
        with grpc.insecure_channel(address) as channel:
            name, next_message = "grpc-trial", partial(_taken, unsent)
            stream = core.ClientStream(
                channel, "/t/E", (), next_message, said.put, said.put, name=name
            )
            stream.wake()
            came = said.get(timeout=TRIAL_SECONDS)
        ended = isinstance(said.get(timeout=TRIAL_SECONDS), public_calls.End)
        if came != b"hello" or not ended:
            raise RuntimeError(f"a message did not come back: {came!r}")
    finally:
        server.stop(TRIAL_SECONDS).wait(TRIAL_SECONDS)  # at once, it would log a GOAWAY
        threads.shutdown(wait=False)
        directory.remove()


def _taken(messages: list[bytes]) -> bytes | None:
    return messages.pop() if messages else None
