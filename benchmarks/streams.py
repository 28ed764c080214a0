"""Episodes and weights from process to process, compared with raw bytes over the same gRPC.

One process sends and another receives, over a Unix socket. Our streams and raw bytes take turns in
the same two processes, each on a core of its own: if the scheduler moves their threads, the same
stream is twice as fast in one second as in the next. Prints one JSON line: megabytes a second, turn
by turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.endpoints import bind, dial, make_server
from juggler.runtime.actors.resources import keep_freed_memory
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import EpisodeReceiver, EpisodeSender
from juggler.runtime.streams.host_weights import WeightsFrame
from juggler.runtime.streams.weights_stream import WeightsPublisher, WeightsSubscription
from juggler.runtime.wire.v1 import episodes_pb2

IN_FLIGHT = 4  # messages, as many as a runner has requests


def _tree(size: int) -> dict[str, Any]:
    """Eight columns with this many bytes in total."""
    columns = {f"column_{n}": np.random.bytes(size // 8) for n in range(8)}
    return {"default": {k: np.frombuffer(v, np.uint8) for k, v in columns.items()}}


def _stay_on_core(number: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _serve(
    handlers: list[grpc.GenericRpcHandler], address: str, streams: int = 8
) -> tuple[grpc.Server, str]:
    """A server, and the address at which it listens."""
    _stay_on_core(1)
    keep_freed_memory()  # as runners and learners do
    server = make_server(streams)
    server.add_generic_rpc_handlers(tuple(handlers))
    bound = bind(server, address)
    server.start()
    return server, bound


# Raw: a stream of messages up, and a byte down for each. The bytes of every message are newly made
# from an array, as in a program that has something new to send.


def raw_server(address: str, ready: Any, _: int) -> None:
    def take(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for newest in messages:
            yield newest[:1]

    handler = grpc.stream_stream_rpc_method_handler(take)
    server, _ = _serve([grpc.method_handlers_generic_handler("raw", {"Push": handler})], address)
    ready.set()
    server.wait_for_termination()


def raw_client(address: str, size: int, seconds: float) -> float:
    payload = np.frombuffer(np.random.bytes(size), np.uint8)
    slots = threading.Semaphore(IN_FLIGHT)
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        while not over.is_set():
            slots.acquire()
            yield payload.tobytes()

    call = dial(address).stream_stream("/raw/Push")(messages())

    def one() -> None:
        next(call)
        slots.release()

    rate = _rate(one, size, seconds)
    over.set()
    slots.release()
    return rate


# Episodes.


def episodes_server(address: str, ready: Any, _: int) -> None:
    receiver = EpisodeReceiver(lambda frame: "", lambda metadata: None)
    server, _ = _serve([receiver.handler()], address)
    ready.set()
    server.wait_for_termination()


class Pushing:
    """Sends the next batch when one is acknowledged, in the thread that hears of that."""

    def __init__(
        self,
        address: str,
        size: int,
        name: str = "",
        metadata: CallMetadata = (),
        memory: str = "",
    ) -> None:
        self._tree = _tree(size)
        self._name = name
        self._sender = EpisodeSender(address, metadata, lambda *_: self.send(), memory=memory)
        self.sent = 0
        self.over = False

    def send(self) -> None:
        if not self.over:
            self.sent += 1
            header = episodes_pb2.BatchHeader(batch_id=self.sent, envrunner=self._name)
            self._sender.send(header, self._tree)

    def close(self) -> None:
        self.over = True
        self._sender.close()


def episodes_client(address: str, size: int, seconds: float) -> float:
    pushing = Pushing(address, size)
    for _ in range(IN_FLIGHT):
        pushing.send()
    rate = _rate_beside(lambda: pushing.sent, size, seconds)
    pushing.close()
    return rate


# Weights: the thread that asks for the next version publishes it, like the thread above that sends
# the next batch.


class Publishing(WeightsPublisher):
    def __init__(self, size: int) -> None:
        super().__init__(lambda metadata: None)
        self._tree = _tree(size)
        self._numbers = itertools.count(1)
        self.publish(Version(1, 0), self._tree)

    def _after(self, *asked: Any) -> Any:
        self.publish(Version(1, next(self._numbers)), self._tree)
        return super()._after(*asked)


def weights_server(address: str, ready: Any, size: int) -> None:
    server, _ = _serve([Publishing(size).handler()], address)
    ready.set()
    server.wait_for_termination()


class CountingSubscription(WeightsSubscription):
    received = 0

    def _take(self, frame: WeightsFrame) -> None:
        super()._take(frame)
        self.received += 1


def weights_client(address: str, size: int, seconds: float) -> float:
    subscription = CountingSubscription(address, (), "bench")
    rate = _rate_beside(lambda: subscription.received, size, seconds)
    subscription.close()
    return rate


# Raw bytes from server to client, in the direction of weights.


def raw_down_server(address: str, ready: Any, size: int) -> None:
    payload = np.frombuffer(np.random.bytes(size), np.uint8)

    def give(request: bytes, context: Any) -> Iterator[bytes]:
        while context.is_active():
            yield payload.tobytes()

    handler = grpc.unary_stream_rpc_method_handler(give)
    server, _ = _serve([grpc.method_handlers_generic_handler("raw", {"Pull": handler})], address)
    ready.set()
    server.wait_for_termination()


def raw_down_client(address: str, size: int, seconds: float) -> float:
    call = dial(address).unary_stream("/raw/Pull")(b"")
    rate = _rate(lambda: next(call), size, seconds)
    call.cancel()
    return rate


def _rate(one: Callable[[], object], size: int, seconds: float) -> float:
    """Megabytes a second, after a warm-up of a fifth of the time."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds / 5:
        one()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        one()
        count += 1
    return count * size / (time.perf_counter() - begin) / 1e6


def _rate_beside(count: Callable[[], int], size: int, seconds: float) -> float:
    """The same, for counts of other threads."""
    time.sleep(seconds / 5)
    before, begin = count(), time.perf_counter()
    time.sleep(seconds)
    return (count() - before) * size / (time.perf_counter() - begin) / 1e6


KINDS = {
    "episodes": ((episodes_server, episodes_client), (raw_server, raw_client)),
    "weights": ((weights_server, weights_client), (raw_down_server, raw_down_client)),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--bytes", type=int, default=256 << 10)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    keep_freed_memory()
    context = multiprocessing.get_context("spawn")
    rates: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        clients, processes = [], []
        for number, (serve, client) in enumerate(KINDS[given.kind]):
            address, ready = f"unix:{directory}/{number}.sock", context.Event()
            process = context.Process(target=serve, args=(address, ready, given.bytes), daemon=True)
            process.start()
            if not ready.wait(60):
                raise SystemExit("the server did not start")
            processes.append(process)
            clients.append(partial(client, address, given.bytes, given.seconds))
        _stay_on_core(0)
        for _ in range(given.turns):
            for client, found in zip(clients, rates, strict=True):
                found.append(client())
        for process in processes:
            process.kill()
            process.join()
    print(json.dumps({"ours": rates[0], "raw": rates[1]}))


if __name__ == "__main__":
    main()
