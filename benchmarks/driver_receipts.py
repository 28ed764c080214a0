"""Only the driver's side: a hub, a request pool and the core, with workers that answer at once.

The workers are fake. They run in processes of their own, each with many streams. Prints one JSON
line: receipts booked per second, and the driver's CPU time for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from typing import Any

from fakes import LIVE_STEPS, FakeWorker, receipt_for

from juggler.driver.core import events
from juggler.driver.core.core_state import ModuleSettings
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.module_core import ModuleStart
from juggler.runtime.actors.hub import Hub, HubSettings, Mailbox, WorkerJoined
from juggler.runtime.actors.requests import RequestPool
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


def answer_at_once(address: str, first: int, count: int) -> None:
    """Many runners in one process and thread, which must cost less than the driver."""

    async def all_of_them() -> None:
        runners = [AnswersAtOnce(first + n) for n in range(count)]
        await asyncio.gather(*(runner.attach(address) for runner in runners))

    asyncio.run(all_of_them())


class AnswersAtOnce(FakeWorker):
    """A runner that answers all requests of a message in one, unlike a `FakeRunner`."""

    role = "envrunner"

    def on(self, command_id: int, name: str, command: attach_pb2.Command) -> None:
        request = training_pb2.SampleRequest.FromString(command.body.value)
        self.reply(command_id, receipt_for(request))


class Bench:
    """The driver's loop, with a learner in this process that finishes updates at once."""

    def __init__(self, runners: int) -> None:
        settings = ModuleSettings(batch_size=LIVE_STEPS, max_open_updates=4 * runners)
        self.core = DriverCore({DEFAULT_MODULE: ModuleStart(settings)})
        self.core.book(events.LearnerJoined("learner-0", "L"))
        self.mailbox: Mailbox[Any] = Mailbox()
        self.hub = Hub(HubSettings(run_id="bench", roles=("envrunner",)), self.mailbox)
        self.pool = RequestPool(self.hub, cap=1 << 16)
        self.workers: dict[str, Any] = {}
        self.updates = 0
        self.booked = 0

    def happened(self, event: events.Event) -> None:
        for command in self.core.book(event):
            assert not isinstance(command, events.Discard), "nothing is in vain here"

    def turn(self) -> None:
        """Like the driver's loop, after all events that came together."""
        # The learner finishes at once, which makes room for the next updates.
        while commands := self.core.issue_updates():
            for command in commands:
                if isinstance(command, events.IssueUpdate):
                    self._update(command)
        for asked in self.core.top_up():
            request = training_pb2.SampleRequest(
                module_id=asked.module_id,
                batch_id=asked.batch_id,
                learner=asked.learner,
                generation=asked.generation,
                at_least=asked.at_least.message(),
            )
            self.pool.submit(self.workers[asked.runner], request)

    def _update(self, command: events.IssueUpdate) -> None:
        self.updates += 1
        (share,) = command.shares
        used = tuple(events.UsedBatch(batch_id, LIVE_STEPS, 1) for batch_id in share.batch_ids)
        version = Version(command.generation, self.updates)
        self.happened(events.UpdateFinished(command.update_id, "learner-0", "L", version, used))

    def hear(self) -> None:
        for event in self.mailbox.gather(0.5):
            for completed in self.pool.complete(event):
                if completed.body is None:
                    continue
                receipt = training_pb2.Receipt()
                completed.body.Unpack(receipt)
                worker = completed.worker
                self.booked += 1
                self.happened(
                    events.SampleReceived(
                        receipt.batch_id,
                        worker.worker_id,
                        worker.incarnation,
                        receipt.learner,
                        receipt.live_steps,
                        Version.of(receipt.version),
                    )
                )
            if isinstance(event, WorkerJoined):
                worker = event.worker
                self.workers[worker.worker_id] = worker
                steps = {DEFAULT_MODULE: LIVE_STEPS}
                self.happened(events.RunnerJoined(worker.worker_id, worker.incarnation, steps))
        self.turn()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runners", type=int, default=256)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    bench = Bench(given.runners)
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        (address,) = bench.hub.start([f"unix:{directory}/driver.sock"])
        context = multiprocessing.get_context("spawn")
        each = given.runners // given.processes
        processes = [
            context.Process(target=answer_at_once, args=(address, n * each, each), daemon=True)
            for n in range(given.processes)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 60
        while len(bench.workers) < each * given.processes and time.monotonic() < deadline:
            bench.hear()
        for _ in range(20):
            bench.hear()
        booked, cpu, started = bench.booked, time.process_time(), time.perf_counter()
        while time.perf_counter() - started < given.seconds:
            bench.hear()
        booked = bench.booked - booked
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        bench.core.counters().check()
        for process in processes:
            process.kill()
        bench.hub.close()
    print(
        json.dumps(
            {"receipts_per_second": booked / seconds, "cpu_microseconds": 1e6 * cpu / booked}
        )
    )


if __name__ == "__main__":
    main()
