"""Work around updates, overlapped with them on a GPU: collation, publishing, metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Columns, Params
from juggler.learner.core.mean_metrics import mean_metrics
from juggler.learner.core.state_trees import arrays_like, to_device
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import tree_leaves
from juggler.runtime.wire.trees import Tree

#: Publishes a version of weights, name -> array.
Publish = Callable[[Version, dict[str, Tree]], None]

#: Maximum number of unfinished updates on a device. With two, one is queued while another runs;
#: with more, published weights would only become older.
_QUEUED = 2
#: A module is hopeless after this many updates in a row in which no optimizer step had finite
#: gradients.
_HOPELESS = 5
_METRICS_SECONDS = 0.5


class UpdateBatches(NamedTuple):
    """A learner's part of an update."""

    batch_ids: list[int]
    episodes: Sequence[EpisodeBatch]  # views of those batches


def is_asynchronous(device: torch.device) -> bool:
    """Return whether a device computes while the host does other work."""
    return device.type != "cpu"


class InTurn:
    """Runs `sample`, the learner's `step` and `made` one after another."""

    def __init__(self, learner: Learner, publish: Publish) -> None:
        self._learner = learner
        self._publish = publish

    def sample(self, share: UpdateBatches) -> Columns:
        """Convert episodes to a sample for the learner's `step`."""
        return self._learner.sample_from_episodes(share.episodes)

    def made(self) -> None:
        """Note that the last sample's update has been issued."""

    def publish(self, version: Version) -> None:
        """Publish the weights after all updates so far."""
        self._publish(version, self._learner.get_weights())

    def forget(self) -> None:
        """Discard a sample prepared for an update that may not come."""

    def close(self) -> None:
        """End the threads that run alongside updates."""


class _Staged(NamedTuple):
    sample: Columns  # on the device
    copied: Any  # the event after its copies


class Overlapped(InTurn):
    """Overlaps collation and publishing with updates on a GPU.

    While one update runs, a thread collates the sample of the next one into page-locked memory, and
    copies it to the device on a separate stream. Another thread publishes the weights of the last
    update in the same way. The main thread issues updates, and waits only if it gets too far ahead.

    A sample is used only for an update of exactly the batches that it was made from.

    Args:
        learner: the learner, which must not be used elsewhere during an update.
        coming: returns this learner's part of the next update, if already known.
        backend: see `SideStream`.
    """

    def __init__(
        self,
        learner: Learner,
        publish: Publish,
        coming: Callable[[], UpdateBatches | None],
        backend: Any = None,
    ) -> None:
        super().__init__(learner, publish)
        self._coming = coming
        self._side = SideStream(learner.device, backend)
        self._publishing = Publishing(publish, SideStream(learner.device, backend))
        self._thread = ThreadPoolExecutor(1, "staging", initializer=self._side.enter_thread)
        self._prepared: tuple[list[int], Future[_Staged]] | None = None
        self._unfinished: deque[Any] = deque()  # events after updates

    def sample(self, share: UpdateBatches) -> Columns:
        started = perf_counter()
        sample = self._ready(share)
        self._learner.collate_seconds += perf_counter() - started
        while len(self._unfinished) >= _QUEUED:
            self._unfinished.popleft().synchronize()
        # Called only now, to include commands that arrived while this thread waited.
        if (coming := self._coming()) is not None:
            staged = self._thread.submit(self._staged, coming.episodes)
            self._prepared = (coming.batch_ids, staged)
        return self._learner.prepared(sample)

    def made(self) -> None:
        self._unfinished.append(self._side.mark())

    def publish(self, version: Version) -> None:
        self._publishing.offer(version, self._learner.get_params())

    def forget(self) -> None:
        self._prepared = None

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._publishing.close()

    def _ready(self, share: UpdateBatches) -> Columns:
        """Return a share's sample on the device, prepared ahead if possible."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == share.batch_ids:
            staged = prepared[1].result()
        else:
            staged = self._staged(share.episodes)
        self._side.hand_over(staged.sample, staged.copied)
        return staged.sample

    def _staged(self, episodes: Sequence[EpisodeBatch]) -> _Staged:
        on_host = self._learner.collated(episodes)
        with self._side.working():
            sample = to_device(on_host, self._learner.device)
            return _Staged(sample, self._side.mark())


class Publishing:
    """Copies weights to the host and publishes them in the background.

    Versions are published in the order of the calls to `offer`. A version is skipped if a newer one
    is offered before its copy begins.
    """

    def __init__(self, publish: Publish, side: SideStream) -> None:
        self._publish = publish
        self._side = side
        self._offered: deque[tuple[Version, Params, Any]] = deque(maxlen=1)  # the newest version
        self._failure: BaseException | None = None
        self._calls: SimpleQueue[bool] = SimpleQueue()  # whether to continue
        # Not of a pool, since a process waits for those as it exits, and publishing may hang.
        self._thread = Thread(target=self._run, name="publishing", daemon=True)
        self._thread.start()

    def offer(self, version: Version, params: Params) -> None:
        """Publish weights soon; never waits.

        Args:
            version: a version newer than all before.
            params: the weights after all updates issued so far; they must not change.

        Raises:
            Exception: an earlier version could not be published.
        """
        if self._failure is not None:
            raise self._failure
        self._offered.append((version, params, self._side.mark()))
        self._calls.put(True)

    def close(self) -> None:
        """End the thread. Weights not yet being copied are not published."""
        self._offered.clear()
        self._calls.put(False)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        try:
            self._side.enter_thread()
        except BaseException as error:
            self._failure = error  # the next offer raises it
        while self._failure is None and self._calls.get():
            self._publish_newest()

    def _publish_newest(self) -> None:
        try:
            # A version has one call here, and an earlier call may have taken a later version.
            while self._offered:
                version, params, made = self._offered.pop()
                with self._side.working(after=made):
                    on_host = to_device(params, torch.device("cpu"))
                    copied = self._side.mark()
                copied.synchronize()
                # `params` keeps the tensors alive until they are copied.
                self._publish(version, arrays_like(on_host))
        except BaseException as error:
            self._failure = error


class SideStream:
    """A stream for copies to and from a device.

    Updates run on the default stream. Copies run alongside on this stream, and the two wait for
    each other only in the methods below. On the CPU, all of this does nothing.

    Args:
        device: the device of the stream.
        backend: the torch module with the device's streams and events, such as torch.cuda.
    """

    def __init__(self, device: torch.device, backend: Any = None) -> None:
        self._device = device
        self._backend = backend or torch.get_device_module(device)
        self.enter_thread()
        self._stream = self._backend.Stream()

    def enter_thread(self) -> None:
        """Prepare this thread to allocate device and page-locked memory."""
        self._backend.set_device(self._device)

    @contextmanager
    def working(self, after: Any = None) -> Iterator[None]:
        """Run the thread's work on this stream, after an event."""
        with self._backend.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def mark(self) -> Any:
        """Return an event after all work issued on this thread's current stream."""
        # blocking: a waiting thread sleeps.
        on_host = self._device.type == "cpu"
        event = self._backend.Event() if on_host else self._backend.Event(blocking=True)
        event.record(self._backend.current_stream())
        return event

    def hand_over(self, sample: Any, copied: Any) -> None:
        """Hand tensors of this stream to the current one, after an event.

        Their memory is not reused before that stream is done with them.
        """
        stream = self._backend.current_stream()
        stream.wait_event(copied)
        for _, tensor in tree_leaves(sample):
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)


class PendingMetrics:
    """Averages metrics on their device; fetches them twice a second.

    Args:
        module_id: for the reason.
        every_update: fetch the metrics of each update, and wait for them.

    Attributes:
        hopeless: why more updates would change nothing; "": updates still work.
    """

    def __init__(self, module_id: str, every_update: bool = False) -> None:
        self.hopeless = ""
        self._module_id, self._every_update = module_id, every_update
        self._pending: list[Mapping[str, Tensor]] = []
        self._skipped_in_a_row = 0  # updates
        self._read_at = 0.0
        #: Names and means [M] of metrics, shares [updates] of skipped steps, the number of the
        #: last of these updates, and the event after the copies to the host.
        self._in_transit: tuple[list[str], Tensor, Tensor, int, Any] | None = None

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the metrics of an update, [] each."""
        self._pending.append(metrics)

    def collect(self, update: int) -> dict[str, float]:
        """Return means since the last result; {}: not due or in transit.

        Args:
            update: number of the newest update.
        """
        if self._every_update:
            return self.collect_all(update)
        is_due = perf_counter() - self._read_at >= _METRICS_SECONDS
        if self._in_transit is None and self._pending and is_due:
            self._send(update)
        there = self._in_transit is not None and self._in_transit[-1].query()
        return self._received() if there else {}

    def collect_all(self, update: int) -> dict[str, float]:
        """Wait for all metrics so far, and return the newest means."""
        in_transit = self._received()
        self._send(update)
        return {**in_transit, **self._received()}

    def _send(self, update: int) -> None:
        """Begin to copy what is pending to the host."""
        self._read_at = perf_counter()
        pending, self._pending = self._pending, []
        if not pending:
            return
        found = mean_metrics(pending)
        means = torch.stack([x.double() for x in found.values()]) if found else torch.zeros(0)
        none = means.new_zeros(())  # [] for a core without this metric
        skipped = torch.stack([each.get("skipped", none) for each in pending])  # [updates]
        on_host = [x.to("cpu", non_blocking=True) for x in (means, skipped)]  # [M], [updates]
        there = torch.get_device_module(means.device).Event()
        there.record()
        self._in_transit = list(found), on_host[0], on_host[1], update, there

    def _received(self) -> dict[str, float]:
        """Wait for the copies in transit, and count skipped updates."""
        if self._in_transit is None:
            return {}
        (names, means, skipped, newest, there), self._in_transit = self._in_transit, None
        there.synchronize()
        for update, share in enumerate(skipped.tolist(), newest - len(skipped) + 1):
            # If only some steps were skipped, the others have changed the weights.
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if share == 1 else 0
            if self._skipped_in_a_row >= _HOPELESS:
                self.hopeless = (
                    f"module {self._module_id!r}: the loss or its gradients were not finite in "
                    f"any step of {_HOPELESS} updates in a row, the last of them update {update}. "
                    "Lower lr, or check the scale of rewards; if no update ever worked, check the "
                    "loss"
                )
        return dict(zip(names, means.tolist(), strict=True))
