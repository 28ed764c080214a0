"""Updates with the work around them, which runs in turn or overlapped: collation, publishing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from juggler.learner.core.learner_core import Columns
from juggler.learner.core.state import to_device
from juggler.learner.learner import Learner
from juggler.learner.process.publishing import Publish, Publishing
from juggler.learner.process.shares import Share
from juggler.learner.process.side_stream import SideStream
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version

#: The most unfinished updates on a device. With two, another is queued while it makes one; with
#: more, weights would only get older on their way.
_QUEUED = 2


def works_by_itself(device: torch.device) -> bool:
    """Whether a device computes while the host does other things."""
    return device.type != "cpu"


class Updating(Protocol):
    """Does the work around updates: `sample`, then the learner's `step`, then `made`."""

    def sample(self, share: Share) -> Columns:
        """Turn these episodes into a sample for the learner's `step`."""

    def made(self) -> None:
        """The learner has asked its device for an update of the last sample."""

    def publish(self, version: Version) -> None:
        """Publish the weights after all updates so far."""

    def forget(self) -> None:
        """Discard a sample that was prepared for an update which may not come."""

    def close(self) -> None:
        """End the threads that run beside updates."""


class InTurn:
    """Does everything in one thread: on a CPU there is nothing to overlap."""

    def __init__(self, learner: Learner, publish: Publish) -> None:
        self._learner = learner
        self._publish = publish

    def sample(self, share: Share) -> Columns:
        return self._learner.sample_from_episodes(share.episodes)

    def made(self) -> None:
        pass

    def publish(self, version: Version) -> None:
        self._publish(version, self._learner.get_weights())

    def forget(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Staged(NamedTuple):
    sample: Columns  # on the device
    copied: Any  # the event behind its copies


class Overlapped:
    """Overlaps collation and publishing with updates on a GPU.

    While one update runs, a thread collates the sample of the next one into page-locked memory, and
    copies it to the device on a stream of its own. Another thread publishes the weights of the last
    update in the same way. The main thread issues updates, and waits only if it gets too far ahead.

    A sample is used only for an update of exactly the batches that it was made from.
    """

    def __init__(
        self,
        learner: Learner,
        publish: Publish,
        coming: Callable[[], Share | None],
        backend: Any = None,
    ) -> None:
        """
        Args:
            learner: nobody else may use it during an update.
            publish: takes weights.
            coming: returns this learner's part of the next update, if that is known already.
            backend: as for `SideStream`.
        """
        self._learner = learner
        self._coming = coming
        self._side = SideStream(learner.device, backend)
        self._publishing = Publishing(publish, SideStream(learner.device, backend))
        self._thread = ThreadPoolExecutor(1, "staging", initializer=self._side.enter_thread)
        self._prepared: tuple[list[int], Future[_Staged]] | None = None
        self._unfinished: deque[Any] = deque()  # events behind updates

    def sample(self, share: Share) -> Columns:
        started = perf_counter()
        sample = self._ready(share)
        self._learner.collate_seconds += perf_counter() - started
        while len(self._unfinished) >= _QUEUED:
            self._unfinished.popleft().synchronize()
        # Asked only now, so that commands which came while this thread waited are seen.
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

    def _ready(self, share: Share) -> Columns:
        """The sample that was prepared for this share, or a new one, on the device."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == share.batch_ids:
            staged = prepared[1].result()
        else:
            staged = self._staged(share.episodes)
        self._side.give(staged.sample, staged.copied)
        return staged.sample

    def _staged(self, episodes: Sequence[EpisodeBatch]) -> _Staged:
        on_host = self._learner.collated(episodes)
        with self._side.working():
            sample = to_device(on_host, self._learner.device)
            return _Staged(sample, self._side.mark())
