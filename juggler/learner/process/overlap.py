"""What goes on around updates: samples in, weights out; one after the other, or beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from juggler.learner.core.learner_core import Sample
from juggler.learner.core.state import to_device
from juggler.learner.learner import Learner
from juggler.learner.process.publishing import Publish, Publishing
from juggler.learner.process.side_stream import SideStream
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version

#: Updates that a device has been asked for and has not finished. While it makes one there is
#: another behind it; with more, weights would only get older on their way.
_QUEUED = 2


def works_by_itself(device: torch.device) -> bool:
    """Whether a device goes on while the host does other things."""
    return device.type != "cpu"


class Share(NamedTuple):
    """A learner's part of an update."""

    batch_ids: list[int]
    episodes: Mapping[str, Sequence[EpisodeBatch]]  # by module id; views of those batches


class Updating(Protocol):
    """What goes on around updates: `sample`, then the learner's `step`, then `made`."""

    def sample(self, share: Share) -> Sample:
        """What the learner's `step` takes, made of these episodes."""

    def made(self) -> None:
        """The learner has asked its device for an update of the last sample."""

    def publish(self, version: Version) -> None:
        """Give out the weights that the updates so far make."""

    def forget(self) -> None:
        """Let go of what was prepared for an update that may not come."""

    def close(self) -> None:
        """End what runs beside updates."""


class InTurn:
    """One after the other, in one thread: on a CPU there is nothing beside which to go on."""

    def __init__(self, learner: Learner, publish: Publish) -> None:
        self._learner = learner
        self._publish = publish

    def sample(self, share: Share) -> Sample:
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
    sample: Sample  # on the device
    copied: Any  # the event behind its copies


class Overlapped:
    """Beside updates, on a device that works by itself while it is told what comes next.

    While one update runs, a thread collates the sample of the next one into page-locked memory and
    has it copied on a stream of its own; the weights of the last one leave in the same way. The
    main thread asks for updates and waits for nothing, but that it gets too far ahead.

    A sample is used only for an update of the very batches that it was made of.
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
            learner: not told to do anything by others in the course of an update.
            publish: takes weights.
            coming: what the next update will be made of, as far as that is known by now.
            backend: as for `SideStream`.
        """
        self._learner = learner
        self._coming = coming
        self._side = SideStream(learner.device, backend)
        self._publishing = Publishing(publish, SideStream(learner.device, backend))
        self._thread = ThreadPoolExecutor(1, "staging", initializer=self._side.enter_thread)
        self._prepared: tuple[list[int], Future[_Staged]] | None = None
        self._unfinished: deque[Any] = deque()  # events behind updates

    def sample(self, share: Share) -> Sample:
        started = perf_counter()
        sample = self._ready(share)
        self._learner.collate_seconds += perf_counter() - started
        while len(self._unfinished) >= _QUEUED:
            self._unfinished.popleft().synchronize()
        # Asked as late as this, commands that came while this thread waited are there to be seen.
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

    def _ready(self, share: Share) -> Sample:
        """On the device: copied there before, or now."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == share.batch_ids:
            staged = prepared[1].result()
        else:
            staged = self._staged(share.episodes)
        self._side.give(staged.sample, staged.copied)
        return staged.sample

    def _staged(self, episodes: Mapping[str, Sequence[EpisodeBatch]]) -> _Staged:
        on_host = self._learner.collated(episodes)
        with self._side.working():
            sample = to_device(on_host, self._learner.device)
            return _Staged(sample, self._side.mark())
