"""Episodes and weights on one host: through shared memory, and inline over gRPC.

Both ways take turns, in processes each of which has a core of its own, as in `streams.py`. Prints
one JSON line. Of episodes it has, turn by turn, megabytes a second and seconds of the learner's CPU
for a gigabyte; of weights, seconds of the learner's CPU until all subscribers have a version.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from streams import IN_FLIGHT, Pushing, _serve, _stay_on_core

from juggler.runtime.actors.resources import keep_freed_memory
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import BatchFrame, EpisodeReceiver
from juggler.runtime.streams.host_weights import Meeting, WeightsFrame
from juggler.runtime.streams.memory_socket import MemorySocket
from juggler.runtime.streams.shared_directory import SHARED_DIR_VARIABLE, shared_address
from juggler.runtime.streams.shared_memory import SHARED_MEMORY_VARIABLE
from juggler.runtime.streams.weights_stream import WeightsPublisher, WeightsSubscription
from juggler.runtime.wire.trees import Tree, flatten

PATIENCE = 60.0  # seconds
WARM_UP = 5  # versions of weights
WAYS = {"shared": "0", "inline": "off"}


def _reads(frame: BatchFrame) -> str:
    """Read all of it, as an update would."""
    for _, array in flatten(frame.tree):
        array.view(np.uint64).sum()
    return ""


def episodes_server(address: str, memory: str, ready: Any, reads: bool) -> None:
    take = _reads if reads else lambda frame: ""
    listens = MemorySocket(memory or address)
    receiver = EpisodeReceiver(take, lambda metadata: None, memory=listens)
    server, bound = _serve([receiver.handler()], address)
    ready.put(bound)
    server.wait_for_termination()


def episodes(given: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {way: [] for way in given.ways}
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        address, memory, ready = f"unix:{directory}/l", "", context.Queue()
        if given.tcp:
            os.environ[SHARED_DIR_VARIABLE] = directory
            address, memory = "127.0.0.1:0", shared_address("learner")
        process = context.Process(
            target=episodes_server, args=(address, memory, ready, given.reads), daemon=True
        )
        process.start()
        address = ready.get(timeout=PATIENCE)
        _stay_on_core(0)
        learner = psutil.Process(process.pid)
        for _ in range(given.turns):
            for way in given.ways:
                os.environ[SHARED_MEMORY_VARIABLE] = WAYS[way]
                pushing = Pushing(address, given.bytes, memory=memory)
                for _ in range(IN_FLIGHT):
                    pushing.send()
                time.sleep(given.seconds / 5)
                sent, cpu, begin = pushing.sent, _cpu(learner), time.perf_counter()
                time.sleep(given.seconds)
                seconds = time.perf_counter() - begin
                gigabytes = (pushing.sent - sent) * given.bytes / 1e9
                used = _cpu(learner) - cpu
                pushing.close()
                found[way].append((gigabytes * 1e3 / seconds, used / gigabytes))
        process.kill()
        process.join()
    return found


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class Counting(WeightsSubscription):
    """Counts with the others, for each version, the readers that have it."""

    def __init__(self, *args: Any, counted: Callable[[Version], None], **kwargs: Any) -> None:
        self._counted = counted
        super().__init__(*args, **kwargs)

    def _take(self, frame: WeightsFrame) -> None:
        super()._take(frame)
        self._counted(Version.of(frame.header.version))


def subscribe(address: str, count: int, says: str, back: Any, direct: bool) -> None:
    os.environ[SHARED_MEMORY_VARIABLE] = says
    keep_freed_memory()
    meeting = None if direct else Meeting(address)
    lock, have = threading.Lock(), Counter[Version]()

    def counted(version: Version) -> None:
        with lock:
            have[version] += 1
            if have[version] == count:
                back.release()  # one word to the learner's process, however many readers

    held = [Counting(address, (), "bench", counted=counted, meeting=meeting) for _ in range(count)]
    threading.Event().wait()
    del held


def weights(given: argparse.Namespace) -> dict[str, Any]:
    """The learner's CPU for a version, with few subscribers and with many."""
    keep_freed_memory()
    tree = {"default": {"weight": np.frombuffer(np.random.bytes(given.bytes), np.float32)}}
    found: dict[str, Any] = {
        f"{way}, {count}": [] for way in given.ways for count in given.subscribers
    }
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        for turn in range(given.turns):
            for way in given.ways:
                for count in given.subscribers:
                    path = f"unix:{directory}/{turn}-{way}-{count}"
                    address = "127.0.0.1:0" if given.tcp else path
                    cost = _cost_of_a_version(address, tree, count, WAYS[way], given)
                    found[f"{way}, {count}"].append(cost)
    return found


def _cost_of_a_version(
    address: str, tree: Tree, count: int, says: str, given: argparse.Namespace
) -> float:
    context = multiprocessing.get_context("spawn")
    memory = None if given.tcp else MemorySocket(address)
    publisher = WeightsPublisher(lambda metadata: None, memory)
    server, address = _serve([publisher.handler()], address, count)
    back = context.Semaphore(0)
    process = context.Process(
        target=subscribe, args=(address, count, says, back, given.direct), daemon=True
    )
    process.start()
    done, cpu, until = 0, 0.0, float("inf")
    while time.perf_counter() < until:
        if done == WARM_UP:
            cpu, until = time.process_time(), time.perf_counter() + given.seconds
        publisher.publish(Version(1, done), tree)
        if not back.acquire(timeout=PATIENCE):
            raise SystemExit("a version did not arrive")
        done += 1
    used = time.process_time() - cpu
    process.kill()
    process.join()
    server.stop(None).wait()
    if memory is not None:
        memory.close()
    return used / (done - WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("episodes", "weights"))
    parser.add_argument("--bytes", type=int, default=4 << 20)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--reads", action="store_true", help="the learner sums up what comes")
    parser.add_argument(
        "--tcp", action="store_true", help="over TCP; episodes with a shared directory"
    )
    parser.add_argument("--direct", action="store_true", help="all readers read from the learner")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=[*WAYS])
    parser.add_argument("--subscribers", type=int, nargs="+", default=[1, 64])
    given = parser.parse_args()
    print(json.dumps({"episodes": episodes, "weights": weights}[given.kind](given)))


if __name__ == "__main__":
    main()
