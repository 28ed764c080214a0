"""An update that a LearnerGroup was asked for, and what became of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from juggler.runtime.wire.v1 import attach_pb2, shards_pb2


@dataclass(frozen=True, slots=True)
class ModuleUpdate:
    """One module's share of an update.

    Attributes:
        metrics: by name.
        live_steps: that it was made of.
        updates: of the module so far, this one included.
    """

    metrics: dict[str, float]
    live_steps: int
    updates: int

    @classmethod
    def of(cls, message: shards_pb2.ModuleUpdated) -> ModuleUpdate:
        return cls(dict(message.metrics.values), message.live_steps, message.updates)


class LearnerGroupError(RuntimeError):
    """Something that a shard could not do; `traceback` is its own, or empty."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback

    @classmethod
    def of(cls, what: str, failure: attach_pb2.Failure) -> LearnerGroupError:
        text = f"{what}: {failure.message}"
        return cls(f"{text}\n{failure.traceback}".rstrip(), failure.traceback)


class ShardLost(LearnerGroupError):
    """A shard's process is gone, and what it was asked for with it. Another one takes its place, if
    the message does not say otherwise."""


class UpdateFailed(LearnerGroupError):
    """Modules could not make their share of an update.

    Attributes:
        failures: by module id.
        results: of the other modules.
    """

    def __init__(
        self, failures: Mapping[str, LearnerGroupError], results: Mapping[str, ModuleUpdate]
    ) -> None:
        super().__init__("\n".join(dict.fromkeys(map(str, failures.values()))))
        self.failures = dict(failures)
        self.results = dict(results)


class UpdateHandle(Future[dict[str, ModuleUpdate]]):
    """`result(timeout)` waits for what became of every module, or raises an UpdateFailed; `done()`
    says whether it would wait."""

    def __init__(self, module_ids: Iterable[str]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # what was asked for cannot be taken back
        self._lock = threading.Lock()
        self._open = set(module_ids)
        self._results: dict[str, ModuleUpdate] = {}
        self._failures: dict[str, LearnerGroupError] = {}

    def end(self, module_id: str, share: Future[ModuleUpdate]) -> None:
        """What became of a module's share."""
        with self._lock:
            error = share.exception()
            if error is None:
                self._results[module_id] = share.result()
            else:
                assert isinstance(error, LearnerGroupError)
                self._failures[module_id] = error
            self._open.discard(module_id)
            if self._open:
                return
        if self._failures:
            self.set_exception(UpdateFailed(self._failures, self._results))
        else:
            self.set_result(self._results)
