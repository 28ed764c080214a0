"""What is missing where nothing is learned, and who brings nothing."""

from __future__ import annotations

from juggler.driver.config import RunConfig
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.worker_events import WorkerEvents
from juggler.runtime.wire.v1 import training_pb2

#: Of an interval that local workers have to be at work so that they are waited for once more; on a
#: busy host they get no more. And how many intervals that helps for.
_AT_WORK = 0.01
_MOST_LOOKS = 10


class Standstill:
    """Looks every now and then whether the run gets on.

    Args:
        config: of the run.
        workers: who should get on.
        local: those of this host.

    Attributes:
        starting: nothing was trained on, but workers that are missing are at work on their start.
    """

    def __init__(self, config: RunConfig, workers: WorkerEvents, local: LocalWorkers) -> None:
        self.starting = False
        self._config = config
        self._workers = workers
        self._local = local
        self._trained_at_last_look = 0
        self._silent: set[str] = set()  # EnvRunners that people have been told of
        self._cpu_at_last_look = 0.0
        self._looks = 0  # without anything that was trained on

    def look(self) -> str:
        """For people: what is missing where nothing was trained on since the last look; else ""."""
        trained, before = self._workers.core.ledger.trained, self._trained_at_last_look
        self._trained_at_last_look = trained
        cpu, cpu_before = self._local.cpu_seconds(), self._cpu_at_last_look
        self._cpu_at_last_look = cpu
        if trained != before:
            self._looks = 0
            return ""
        self._looks += 1
        seconds = self._config.driver.worker_timeout_seconds
        self.starting = cpu - cpu_before > _AT_WORK * seconds and self._looks < _MOST_LOOKS
        return f"no update in the last {seconds:.0f} s. {self.what_is_there()}"

    def silent_runners(self) -> list[str]:
        """For people: of each EnvRunner that has begun to bring nothing since the last look."""
        silent = self._by_silent_runner()
        new = [text for name, text in silent.items() if name not in self._silent]
        self._silent = set(silent)
        return [
            f"{text}. Others are asked for less meanwhile. Are its environments slow, or stuck?"
            for text in new
        ]

    def _by_silent_runner(self) -> dict[str, str]:
        """By worker id, of those that have held a request for long."""
        requests = self._workers.commands.pool.waiting(training_pb2.SampleRequest)
        return {
            worker.worker_id: f"{worker.worker_id} on {worker.host} has been asked for {count} "
            f"batch{'' if count == 1 else 'es'} and has brought none for {seconds:.0f} s"
            for worker, (count, seconds) in requests.items()
            if seconds >= self._config.driver.worker_timeout_seconds
        }

    def what_is_there(self) -> str:
        """For people who wait for updates."""
        core, registry = self._workers.core, self._workers.registry
        parts = [registry.describe(), *self._by_silent_runner().values()]
        if core.missing_learners:
            parts.append(f"waits for learners: {core.missing_learners} more")
        if core.members:
            size = self._config.learner.batch_size
            parts.append(f"an update takes {size} steps, {core.held_steps} are there")
        if self._workers.confirmation.under_way and self._config.driver.synchronous:
            parts.append("the next round waits until it is known whether the run is solved")
        if registry.last_failure:
            parts.append(f"the last failure: {registry.last_failure}")
        return "; ".join(parts)
