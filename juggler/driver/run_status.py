"""Assembles the status of a run from its parts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from juggler.driver.reporting.progress import Journal
from juggler.driver.reporting.run_directory import to_json
from juggler.driver.reporting.worker_histories import WorkerHistory
from juggler.driver.run_parts import RunParts
from juggler.runtime.actors.hub import Vitals
from juggler.runtime.actors.requests import Histogram
from juggler.runtime.actors.resources import resident_bytes
from juggler.runtime.wire.v1 import status_pb2


@dataclass(frozen=True, slots=True)
class StatusReader:
    """Assembles a run's status from its parts, in the driver's thread."""

    run_id: str
    parts: RunParts
    journal: Journal
    # Returns the newest line of metrics; {} before the first one
    newest_line: Callable[[], Mapping[str, Any]]

    def read(self) -> status_pb2.RunStatus:
        parts, core, histories = self.parts, self.parts.core, self.parts.metrics.workers
        rates = histories.rates()
        # The time is of now, since a run that waits at its end writes no lines.
        line = {**self.newest_line(), "wall_time": parts.clock.now().wall}
        status = status_pb2.RunStatus(
            run_id=self.run_id,
            run_dir=str(parts.run_dir.resolve()),
            env=parts.config.env_runner.env,
            algorithm=parts.config.learner.algorithm,
            phase=self._phase(),
            # Numbers of the run are in its metrics; the rest changes faster, or is for operators.
            metrics=json.dumps(to_json(line)),
            updates=parts.metrics.updates,
            queues=status_pb2.Queues(
                requests_in_flight=core.requests_in_flight,
                updates_in_flight=core.updates_in_flight,
                queued_batches=core.held_batches,
                queued_steps=core.held_steps,
            ),
            staleness=_histogram(parts.metrics.staleness),
            sample_request_seconds=_histogram(parts.commands.sample_request_seconds),
            update_seconds=_histogram(parts.commands.update_seconds),
            driver=status_pb2.Resources(
                cpu_seconds=time.process_time(), resident_bytes=resident_bytes()
            ),
        )
        # Workers that are gone stay, with their last error.
        vitals = parts.hub.vitals()
        for name, history in histories.by_id.items():
            worker = self._worker(history, rates.get(name, 0.0), vitals.get(name))
            status.workers.append(worker)
        for moment, level, text in self.journal.newest:
            status.log_messages.add(time=moment, level=level, text=text)
        return status

    def _phase(self) -> str:
        """Describe what the run is doing, also while it writes no metrics."""
        parts = self.parts
        ending = parts.end.reached
        # An asynchronous run trains while a candidate is played. `confirming` may give one up, as
        # each look at it may.
        if (ending or parts.config.driver.synchronous) and parts.evaluations.confirming:
            return "confirming that the run is solved"
        if ending and parts.checkpoints.under_way:
            return "writing the last checkpoint"
        return parts.end.reason or "training"

    def _worker(
        self, history: WorkerHistory, rate: float, vitals: Vitals | None
    ) -> status_pb2.WorkerStatus:
        now = time.monotonic()
        status = status_pb2.WorkerStatus(
            worker_id=history.worker_id,
            role=history.role,
            state=history.state,
            device=self.parts.registry.devices.get(history.worker_id, ""),
            steps=history.steps,
            steps_per_second=rate,
            seconds_silent=now - history.changed if vitals is None else vitals.seconds_silent,
            restarts=history.restarts,
            last_error=history.last_error,
            seconds_since_error=now - history.error_time if history.last_error else 0.0,
            seconds=history.total_seconds(),
            counts=history.total_counts(),
        )
        # An unset field is unknown, as opposed to 0.
        if history.simulators is not None:
            status.simulators.CopyFrom(history.simulators)
        if history.version is not None:
            status.version.CopyFrom(history.version.message())
        if (worker := history.worker) is not None:
            status.host, status.pid = worker.host, worker.pid
            status.incarnation = worker.incarnation
        if vitals is not None:
            status.resources.resident_bytes = vitals.resident_bytes
            status.resources.device_bytes = vitals.device_bytes
            status.resources.cpu_seconds = vitals.cpu_seconds
        return status


def _histogram(histogram: Histogram) -> status_pb2.Histogram:
    return status_pb2.Histogram(bounds=histogram.bounds, counts=histogram.counts, sum=histogram.sum)
