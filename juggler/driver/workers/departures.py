"""Workers that leave, and processes that end."""

from __future__ import annotations

import re
import textwrap

from juggler.driver.config import RunConfig
from juggler.driver.record.metrics import Metrics
from juggler.driver.record.progress import Progress
from juggler.driver.run_end import RunEnd
from juggler.driver.workers.confirmation import Confirmation
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.registry import WorkerRegistry
from juggler.envrunner.program import ENVRUNNER, EVALUATOR
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hub_events import Left, Worker
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.wire.v1 import attach_pb2

_REMEMBERED = 100  # failures

#: Which of its environments and steps it was differs from life to life.
_NUMBER = re.compile(r"(?<=environment )\d+|(?<=at step )\d+")
_WHEN = re.compile(r"(?<=in round )\d+|(?<=update )\d+|(?<=batch )\d+")


class Departures:
    """Tells people of workers that are gone, and ends a run that cannot go on without them.

    Args:
        only_local: all workers are processes of this host that the driver starts.

    Attributes:
        last_failure: of any worker, in its own words; "": none has failed.
        last_exit: a message about the last process that ended by itself; "": none has.
        failures: by worker id, the last one of each local worker, in its own words.
    """

    def __init__(
        self,
        config: RunConfig,
        end: RunEnd,
        registry: WorkerRegistry,
        local: LocalWorkers,
        confirmation: Confirmation,
        metrics: Metrics,
        progress: Progress,
        only_local: bool,
    ) -> None:
        self.last_failure = self.last_exit = ""
        self.failures: dict[str, str] = {}
        self._env = config.env_runner.env
        self._synchronous = config.driver.synchronous
        self._end = end
        self._registry = registry
        self._local = local
        self._confirmation = confirmation
        self._metrics = metrics
        self._progress = progress
        self._only_local = only_local
        self._lasting: dict[str, str] = {}  # by worker id, the rule that it broke last
        # Failures that people have seen already, and which worker had each of them last.
        self._shown: dict[str, str] = {}

    def hopeless(self, event: Left) -> bool:
        """Where no EnvRunner has ever worked, to try again would only fail in the same way."""
        return bool(event.failure) and not self._registry.had_runner and self._only_local

    def left(self, event: Left) -> None:
        """Tell people of a worker that has left, unless what ends the run says it all."""
        failure = event.failure
        if self._local.is_let_go(event.worker.worker_id):
            return  # its exit is told
        if self._end.reached or (self.hopeless(event) and failure and not failure.traceback):
            return
        text = f"{event.worker.worker_id} left: {event.reason}"
        if failure is not None:
            self.last_failure = failure.message
            if event.worker.local:  # it may stay down, and people see it again
                self.failures[event.worker.worker_id] = failure.message
                self._fails(event.worker, failure)
            # Where workers fail in the same way again, it need not be printed all again.
            words = _WHEN.sub("", _NUMBER.sub("", failure.message))
            before = self._shown.pop(words, "")
            self._shown[words] = event.worker.worker_id
            if len(self._shown) > _REMEMBERED:
                del self._shown[next(iter(self._shown))]
            if before:
                same = "before" if before == event.worker.worker_id else before
                text = f"{event.worker.worker_id} left for the same reason as {same}"
            elif failure.traceback:
                text += f"\n{_inset(failure.traceback)}"
        if event.stack:
            text += f"\nIt was here:\n{_inset(event.stack)}"
        self._progress.message(text, "error" if failure else "warning")

    def _fails(self, worker: Worker, failure: attach_pb2.Failure) -> None:
        """A local worker has failed. To break the same rule again in each life helps nobody."""
        words = _NUMBER.sub("", failure.message) if failure.lasting else ""
        before, self._lasting[worker.worker_id] = self._lasting.get(worker.worker_id), words
        if words and words == before:
            self._local.give_up(worker.worker_id, worker.pid)

    def exited(self, event: Exited) -> None:
        """A local process has ended. If it was attached, it has also left."""
        role = event.worker_id.rpartition("-")[0]
        let_go = self._local.is_let_go(event.worker_id)
        self._metrics.workers.exited(event, failed=not let_go)
        if self._end.reached or (let_go and event.restart_in is not None):
            return None  # who is let go before the restart stays down, and that is told next
        self.last_exit = f"{event.worker_id} ended: {event.how}"
        if self._local.was_let_go(event.worker_id):
            return self._progress.message(f"{event.worker_id} has left, as asked", "info")
        if event.restart_in is not None:
            text = f"{event.worker_id} (pid {event.pid}) ended: {event.how}. Starting it again"
            return self._progress.message(text, "warning")
        self._local.gave_up_on(event.worker_id)
        nobody = self._only_local and not self._local.any_up(role)
        if role == LEARNER and nobody:
            return self._end.fail(f"{event.worker_id} is lost: {event.how}", "learner_lost")
        text = f"{event.worker_id} keeps ending (the last time: {event.how}) and stays down"
        if role == ENVRUNNER and nobody:
            text = f"no EnvRunner is left to step {self._env}: {text}. {self.last_failure}"
            return self._end.fail(text.rstrip(), "no_envrunner")
        if role == EVALUATOR and nobody:
            self._confirmation.impossible(f"{event.worker_id} keeps ending")
        if role == LEARNER and (orphans := self._without_learners(event.worker_id)):
            text += f". Nobody trains {' and '.join(orphans)} any more"
            if self._synchronous:  # its turns are of all modules
                return self._end.fail(text, "learner_lost")
            text += ". Other modules train on, without checkpoints"
        failure = self.failures.get(event.worker_id, "")
        return self._progress.message(f"{text}. {failure}".rstrip(". "), "error")

    def _without_learners(self, worker_id: str) -> list[str]:
        """Those modules of a learner that stays down which no other learner hosts."""
        index = int(worker_id.rpartition("-")[2])
        return [
            f"module {module_id!r}"
            for module_id in self._registry.modules_of(index)
            if not self._registry.learners_of(module_id)
        ]


def _inset(text: str) -> str:
    """Lines of a worker, which must not look like those of the run."""
    return textwrap.indent(text.rstrip(), "  ", lambda _: True)
