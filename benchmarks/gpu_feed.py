"""A learner fed over gRPC by processes that send batches of images as fast as it takes them.

The real learner with its streams runs in this process. This script plays the driver: it issues
updates as soon as their steps are there, two in flight. Prints one JSON line: steps a second from
arrival to published weights, and of the same updates on samples that are on the device already.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from google.protobuf import any_pb2
from google.protobuf.message import Message
from gymnasium import spaces

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.process.learner_program import (
    LearnerProgram,
    LearnerSetup,
    ModuleSetup,
    devices_here,
)
from juggler.learner.process.learner_worker import LearnerServer, LearnerWorker
from juggler.runtime.actors.attachment import Contact, Detached, ReceivedCommand
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.actors.resources import keep_freed_memory
from juggler.runtime.actors.worker import to_json
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.streams.weights_stream import WeightsSubscription
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

FRAMES = spaces.Box(0, 255, (84, 84, 4), np.uint8)
ACTIONS = spaces.Discrete(6)
IN_FLIGHT = 2
METADATA = call_metadata("", "bench", "one")


def image_batch(rows: int, steps: int, seed: int = 0) -> EpisodeBatch:
    """A batch in the middle of episodes, one for each row."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(rows)
    flags = np.zeros((rows, steps), np.bool_)
    columns = {
        "observations": rng.integers(0, 255, (rows, steps, 84, 84, 4), np.uint8),
        "actions": rng.integers(0, 6, (rows, steps)),
        "rewards": rng.standard_normal((rows, steps), np.float32),
        "terminated": flags,
        "truncated": flags,
        "live": ~flags,
        "action_logp": np.full((rows, steps), -np.log(6), np.float32),
        "last_observations": rng.integers(0, 255, (rows, 84, 84, 4), np.uint8),
        "states": {},
        "final_observations": np.zeros((0, 84, 84, 4), np.uint8),
        "final_rows": np.zeros(0, np.int32),
        "final_steps": np.zeros(0, np.int32),
        "segment_rows": numbers.astype(np.int32),
        "segment_starts": np.zeros(rows, np.int32),
        "segment_lengths": np.full(rows, steps, np.int32),
        "segment_offsets": np.zeros(rows, np.int32),
        "segment_episodes": numbers.astype(np.uint64),
        "segment_generations": np.ones(rows, np.uint64),
        "segment_updates": np.ones(rows, np.uint64),
    }
    return EpisodeBatch.from_tree(columns)


def send(address: str, rows: int, steps: int, ids: Any, credit: Any) -> None:
    """A runner with prepared batches: it sends one for each request, with the newest version."""
    keep_freed_memory()
    tree = {"default": image_batch(rows, steps).to_tree()}
    sender = EpisodeSender(address, METADATA, lambda *_: None)
    weights = WeightsSubscription(address, METADATA, "bench")
    while True:
        credit.acquire()
        with ids.get_lock():
            ids.value += 1
            batch_id = ids.value
        newest = weights.newest
        version = newest.version if newest else Version(1, 0)
        header = episodes_pb2.BatchHeader(
            batch_id=batch_id,
            generation=1,
            live_steps=rows * steps,
            version=version.message(),
            module_id="default",
        )
        sender.send(header, tree)


class Driver:
    """Stands in for the learner's attachment, and issues updates of batches that have arrived."""

    run_id = "bench"
    incarnation = "learner"
    worker_id = "learner-0"

    def __init__(self, batches_per_update: int, credit: Any) -> None:
        self.inbox: Mailbox[ReceivedCommand | Detached] = Mailbox()
        self.trained = 0
        self.seconds: dict[str, float] = {}
        self._per_update = batches_per_update
        self._credit = credit
        self._arrived: deque[int] = deque()
        self._in_flight = 0
        self._updates = itertools.count()
        self._lock = threading.Lock()
        self._answered = threading.Event()

    def ask(self, command: Message) -> None:
        """Wait for the answer."""
        self._answered.clear()
        self._tell(command)
        self._answered.wait()

    def _tell(self, command: Message) -> None:
        body = any_pb2.Any()
        body.Pack(command)
        self.inbox.put(ReceivedCommand(1, body))

    def _issue(self) -> None:
        with self._lock:
            while self._in_flight < IN_FLIGHT and len(self._arrived) >= self._per_update:
                ids = [self._arrived.popleft() for _ in range(self._per_update)]
                self._in_flight += 1
                update = training_pb2.Update(
                    module_id="default", update_id=next(self._updates), batch_ids=ids
                )
                self._tell(update)

    # The methods that the learner calls.

    def begins(self, command_id: int) -> None:
        pass

    def busy(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def progresses(self) -> None:
        pass

    def report(self, report: Message) -> None:
        if not isinstance(report, training_pb2.Arrivals):
            return
        with self._lock:
            self._arrived.extend(arrival.batch_id for arrival in report.arrivals)
        self._issue()

    def reply(self, command_id: int, body: Message, *, last: bool = True) -> None:
        if not isinstance(body, training_pb2.UpdateDone):
            self._answered.set()
            return
        with self._lock:
            self._in_flight -= 1
        self.trained = body.steps_trained
        self.seconds = dict(body.seconds) or self.seconds
        for _ in body.batches:
            self._credit.release()
        self._issue()

    def fail(self, command_id: int, error: BaseException) -> None:
        traceback.print_exception(error)
        os._exit(1)  # rather than wait for its answer


def end_to_end(given: argparse.Namespace, config: ImpalaConfig) -> dict[str, Any]:
    """Steps a second through a whole learner."""
    context = multiprocessing.get_context("spawn")
    per_update = given.steps // (given.rows * given.fragment)
    ids, credit = context.Value("Q", 0), context.Semaphore(per_update * given.open)
    driver = Driver(per_update, credit)
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        attachment: Any = driver
        program = LearnerProgram(Contact("", socket_dir=directory))
        server = LearnerServer(program)
        (address,) = server.addresses
        worker = LearnerWorker(attachment, driver.inbox, program, server)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        of_process = LearnerSetup(device=given.device, updates_in_flight=2, may_meet=False)
        of_module = ModuleSetup(
            learner=asdict(config),
            module=ModuleConfig(model={"encoder": given.encoder}),
            connectors={},
        )
        driver.ask(training_pb2.Setup(config=to_json(of_process)))
        module = training_pb2.AddModule(
            module_id="default",
            config=to_json(of_module),
            observation_space=space_to_message(FRAMES),
            action_space=space_to_message(ACTIONS),
        )
        driver.ask(module)
        driver.ask(training_pb2.Group(module_id="default", generation=1, members=["learner-0"]))
        arguments = (address, given.rows, given.fragment, ids, credit)
        senders = [
            context.Process(target=send, args=arguments, daemon=True) for _ in range(given.senders)
        ]
        for sender in senders:
            sender.start()
        weights = WeightsSubscription(address, METADATA, "bench")
        first = weights.wait_for(Version(1, 3), timeout=120).version.update  # warm-up is over
        trained, begin = driver.trained, time.perf_counter()
        time.sleep(given.seconds)
        trained, seconds = driver.trained - trained, time.perf_counter() - begin
        newest = weights.newest
        assert newest is not None
        published = newest.version.update - first
        for sender in senders:
            sender.kill()
            sender.join()
        weights.close()
        driver.inbox.put(Detached("over"))
        thread.join()
        worker.close()
    shares = {name: driver.seconds[name] / sum(driver.seconds.values()) for name in driver.seconds}
    return {"rate": trained / seconds, "versions": published / seconds, "shares": shares}


def on_device(given: argparse.Namespace, config: ImpalaConfig) -> float:
    """Steps a second of the same updates on samples that are on the device already."""
    model = {"encoder": given.encoder}
    learner = build_learner(config, None, FRAMES, ACTIONS, model, device=given.device)
    count = given.steps // (given.rows * given.fragment)
    batches = [image_batch(given.rows, given.fragment, seed) for seed in range(count)]
    sample = learner.sample_from_episodes(batches)
    synchronize = torch.get_device_module(learner.device).synchronize
    for _ in range(3):
        learner.step(sample)
    synchronize()
    rates: list[float] = []
    end = time.perf_counter() + given.seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(given.block):
            learner.step(sample)
        synchronize()
        rates.append(given.block * given.steps / (time.perf_counter() - begin))
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=devices_here()[0])
    parser.add_argument("--encoder", default="nature_cnn")
    parser.add_argument("--steps", type=int, default=16384, help="live steps in an update")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--fragment", type=int, default=32, help="steps of a row")
    parser.add_argument("--senders", type=int, default=15)
    parser.add_argument("--open", type=int, default=4, help="updates' worth of batches under way")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--block", type=int, default=10, help="updates between timings")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", choices=("on_device", "end_to_end"))
    given = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    config = ImpalaConfig(precision=given.precision, compile=given.compile, max_staleness=1_000_000)
    found: dict[str, Any] = {}
    if given.only != "end_to_end":
        found["on_device"] = on_device(given, config)
    if given.only != "on_device":
        found["end_to_end"] = end_to_end(given, config)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
