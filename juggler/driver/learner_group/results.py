"""What a LearnerGroup gives back: updates, states, and what went wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from google.protobuf import any_pb2

from juggler.driver.checkpoint.snapshots import state_reader
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


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
    def of(cls, module_id: str, replies: Sequence[any_pb2.Any]) -> ModuleUpdate:
        """From the answer to an exact update.

        Raises:
            ValueError: it is none.
        """
        done = training_pb2.UpdateDone()
        if len(replies) != 1 or not replies[0].Unpack(done):
            raise ValueError("something else than an UpdateDone")
        metrics = dict(done.metrics[module_id].values)
        live_steps = sum(batch.live_steps for batch in done.batches)
        return cls(metrics, live_steps, done.version.update)


@dataclass(frozen=True, slots=True)
class ModuleState:
    """All that training has made of a module, as `Learner.save` gives it.

    Attributes:
        tree: parameters, optimizer and whatever the algorithm keeps, as arrays by name.
        extra: the rest, as JSON has it: "algorithm" and "updates".
    """

    tree: Mapping[str, Tree]
    extra: Mapping[str, Any]

    @classmethod
    def of(cls, replies: Sequence[any_pb2.Any]) -> ModuleState:
        """From the answers to a Snapshot.

        Raises:
            ValueError: they are no whole state.
        """
        reader = state_reader()
        frames = [reader.feed(reply.value) for reply in replies]
        if not frames or (frame := frames[-1]) is None or not isinstance(frame.tree, dict):
            raise ValueError("a state that is not whole")
        return cls(frame.tree, json.loads(frame.header.extra))


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
