"""What it costs to send a batch from an EnvRunner to a learner of the same host."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from threading import Semaphore

from juggler.driver.config import ConfigError
from juggler.runtime.actors.endpoints import bind, make_server
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.streams.episodes import EpisodeReceiver, EpisodeSender
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import episodes_pb2

_IN_FLIGHT = 4  # batches
_SENT_SECONDS = 30.0  # for a batch to arrive


def seconds_to_send(batch: EpisodeBatch, seconds: float) -> float:
    """CPU seconds of both ends, which are in this process, for a batch over a Unix socket.

    Args:
        batch: is sent again and again.
        seconds: for how long.

    Raises:
        ConfigError: it does not arrive.
    """
    with tempfile.TemporaryDirectory(prefix="juggler-tune-") as directory:
        return _sent(f"unix:{Path(directory) / 'learner.sock'}", batch, seconds)


def _sent(address: str, batch: EpisodeBatch, seconds: float) -> float:
    free, problems = Semaphore(_IN_FLIGHT), [""]

    def settled(_: int, reason: str, why: str) -> None:
        problems[0] = problems[0] or f"{reason} {why}".strip()
        free.release()

    receiver = EpisodeReceiver(lambda frame: "", lambda metadata: None, Limits())
    server = make_server(2)
    server.add_generic_rpc_handlers((receiver.handler(),))
    bind(server, address)
    server.start()
    sender = EpisodeSender(address, (), settled)
    tree = {DEFAULT_MODULE: batch.to_tree()}
    try:
        count, began, used = 0, 0.0, 0.0
        while count <= _IN_FLIGHT or time.perf_counter() - began < seconds:
            if not free.acquire(timeout=_SENT_SECONDS):
                raise ConfigError(f"a batch did not arrive within {_SENT_SECONDS:g} s on {address}")
            if problems[0]:
                raise ConfigError(f"a batch was not taken: {problems[0]}")
            count += 1
            if count == _IN_FLIGHT:  # the stream is open
                began, used = time.perf_counter(), time.process_time()
            sender.send(episodes_pb2.BatchHeader(batch_id=count), tree)
        return (time.process_time() - used) / (count - _IN_FLIGHT)
    finally:
        sender.close()
        server.stop(1.0).wait()
