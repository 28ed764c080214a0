"""Episodes from many senders to one learner, and its weights to many subscribers, over TCP.

The learner's ends are in this process, the others in further ones. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from streams import IN_FLIGHT, Pushing

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import bind, make_server
from juggler.runtime.actors.resources import keep_freed_memory
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams import weights_stream
from juggler.runtime.streams.episodes import BatchFrame, EpisodeReceiver
from juggler.runtime.streams.memory_socket import MemorySocket
from juggler.runtime.streams.weights_stream import WeightsPublisher, WeightsSubscription

PATIENCE = 30.0  # seconds


class Used:
    """Time and memory that this process has used since the start of the measurement."""

    def __init__(self) -> None:
        self._time, self._cpu = time.perf_counter(), time.process_time()
        self._rss = psutil.Process().memory_info().rss

    def figures(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self._time,
            "cpu_seconds": time.process_time() - self._cpu,
            "megabytes_more": (_peak() - self._rss) / 1e6,
            "threads": psutil.Process().num_threads(),
        }


def _peak() -> int:
    """The peak of this process's resident memory, in bytes."""
    (line,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def _serve(handler: grpc.GenericRpcHandler, local: str = "") -> tuple[grpc.Server, str]:
    """A server and its address; it also listens at `local`, a Unix socket. The server stops when
    its last reference is gone."""
    server = make_server(1024)
    server.add_generic_rpc_handlers((handler,))
    address = bind(server, "127.0.0.1:0")
    if local:
        bind(server, local)
    server.start()
    return server, address


def _start(target: Callable[..., None], address: str, count: int, *rest: object) -> list[Any]:
    """Processes, one for every two cores, that share `count` senders or subscribers."""
    context = multiprocessing.get_context("spawn")
    number = max(2, len(os.sched_getaffinity(0)) // 2)
    shares = [len(range(n, count, number)) for n in range(number)]
    processes = [
        context.Process(target=target, args=(address, share, *rest), daemon=True)
        for share in shares
        if share
    ]
    for process in processes:
        process.start()
    return processes


def _end(server: grpc.Server, processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    server.stop(grace=None)


# Episodes.


RUN_ID = "bench"


def send(address: str, count: int, size: int) -> None:
    """Send as fast as possible."""
    metadata = call_metadata("", RUN_ID, "")
    senders = [Pushing(address, size, f"{os.getpid()}-{n}", metadata) for n in range(count)]
    for pushing in senders:
        for _ in range(IN_FLIGHT):
            pushing.send()
    threading.Event().wait()


def episodes(count: int, size: int, seconds: float) -> dict[str, Any]:
    """The cost of receiving as fast as possible, in this process."""
    received: Counter[str] = Counter()  # by sender

    def take(frame: BatchFrame) -> str:
        received[frame.header.envrunner] += 1
        return ""

    before = Used()
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        local = f"unix:{directory}/l"
        memory = MemorySocket(local)
        receiver = EpisodeReceiver(take, lambda metadata: None, memory=memory)
        server, address = _serve(receiver.handler(), local)
        try:
            return _episodes(server, address, count, size, seconds, received, before)
        finally:
            memory.close()


def _episodes(
    server: grpc.Server,
    address: str,
    count: int,
    size: int,
    seconds: float,
    received: Counter[str],
    before: Used,
) -> dict[str, Any]:
    processes = _start(send, address, count, size)
    deadline = time.monotonic() + PATIENCE
    while len(received) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"batches came from {len(received)} of {count}")
        time.sleep(0.1)
    time.sleep(seconds / 4)
    begun, used = dict(received), Used()
    time.sleep(seconds)
    figures, ended = used.figures(), dict(received)
    theirs = sum(psutil.Process(process.pid).num_threads() for process in processes)
    _end(server, processes)
    each = [ended[sender] - begun[sender] for sender in ended]
    megabytes = sum(each) * size / 1e6
    return {
        "megabytes_per_second": megabytes / figures["seconds"],
        "cpu_seconds_per_gigabyte": 1e3 * figures["cpu_seconds"] / megabytes,
        "threads": figures["threads"],
        "threads_of_each_sender": theirs / count,
        "megabytes_more": before.figures()["megabytes_more"],
        "least": min(each),
        "most": max(each),
    }


# Weights.


class Fanning(WeightsPublisher):
    """Notes when a subscriber has a whole version."""

    def __init__(self) -> None:
        super().__init__(lambda metadata: None)
        self.back = threading.Semaphore(0)

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

    def _after(self, module_id: str, sent: Version | None, context: Any) -> Any:
        if sent is not None:
            self.back.release()
        return super()._after(module_id, sent, context)


def subscribe(address: str, count: int) -> None:
    subscriptions = [WeightsSubscription(address, (), "bench") for _ in range(count)]
    threading.Event().wait()
    del subscriptions


def fan_out(count: int, size: int, seconds: float) -> dict[str, Any]:
    """The cost of publishing a version until every subscriber has it."""
    encode, calls = weights_stream.encode_frame, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return encode(*args, **options)

    weights_stream.encode_frame = counted
    publisher = Fanning()
    server, address = _serve(publisher.handler())
    processes = _start(subscribe, address, count)

    def all_are_back() -> None:
        for number in range(count):
            if not publisher.back.acquire(timeout=PATIENCE):
                raise TimeoutError(f"{number} of {count} subscribers are served")

    deadline = time.monotonic() + PATIENCE
    while publisher.subscribers < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{publisher.subscribers} of {count} have subscribed")
        time.sleep(0.1)
    tree = {"default": {"weight": np.frombuffer(np.random.bytes(size), np.uint8)}}
    versions, used = 0, Used()
    while used.figures()["seconds"] < seconds:
        versions += 1
        publisher.publish(Version(1, versions), tree)
        all_are_back()
    figures = used.figures()
    _end(server, processes)
    assert calls == versions, f"{calls} frames were made for {versions} versions"
    return {
        "versions": versions,
        "cpu_seconds_per_version": figures["cpu_seconds"] / versions,
        "megabytes_per_second": versions * count * size / figures["seconds"] / 1e6,
        "threads": figures["threads"],
        "megabytes_more": figures["megabytes_more"],
    }


KINDS: dict[str, Callable[..., dict[str, Any]]] = {"episodes": episodes, "weights": fan_out}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=16, help="number of senders or subscribers")
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    keep_freed_memory()
    print(json.dumps(KINDS[given.kind](given.count, given.bytes, given.seconds)))


if __name__ == "__main__":
    main()
