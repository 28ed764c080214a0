"""Peers: the other learners of a group, in one generation of it.

Learners of one host, or of a trusted network, communicate over torch.distributed (`torch_peers`);
learners of several hosts over encrypted streams (`ring_peers`). All take over the state of the
learner with the most updates. From then on, a gradient is the same as a single learner's on all
samples: a mean that weights each learner by its live steps.
"""

from __future__ import annotations

import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from juggler.learner.core.learner_core import Aux, Grads
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import training_pb2

#: Time limit for meeting, and for one operation; in a ring, for one message.
COLLECTIVE_SECONDS = 8.0
#: Interval at which learners check that the others still work.
_PROGRESS_SECONDS = 1.0

T = TypeVar("T")


class PeerLost(RuntimeError):
    """A collective operation failed: a learner is gone, hanging or unreachable."""


class Peers(ABC):
    """This learner's connections to the others.

    Attributes:
        rank: rank of this learner.
        size: number of learners.
        progresses: called while this learner waits for others, or sends them large data, to show
            that it does not hang.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.progresses: Callable[[], None] = lambda: None

    def sum(self, x: Tensor) -> Tensor:
        """Sum elementwise over all learners, bitwise equal; may change x.

        Raises:
            PeerLost: a learner is gone.
            NcclStuck: a learner is gone, and this process can no longer use its device.
        """
        return self._sum_on_host(_on_host(x)).to(x.device, non_blocking=True)

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return all learners' values, signed 64-bit integers, by rank."""
        table = torch.zeros((self.size, len(values)), dtype=torch.int64)  # [k, n]
        table[self.rank] = torch.tensor(values)
        return self.sum(table).tolist()

    def wait_for_all(self, work: Callable[[], T]) -> T:
        """Do this learner's work, wait for the others', return the result.

        Work may take longer than the time limit of one operation. After `hang_seconds`, the driver
        ends a learner that hangs in its work, but not the learners that wait for it.

        Raises:
            PeerLost: a learner is gone.
        """
        done = threading.Event()

        def exchange() -> None:
            all_done = False
            while not all_done:
                done.wait(_PROGRESS_SECONDS)
                all_done = all(each for (each,) in self.gather([int(done.is_set())]))

        # Others ask while this learner works, so another thread answers them.
        with ThreadPoolExecutor(1, "still-working") as pool:
            exchanged = pool.submit(exchange)
            try:
                found = work()
            finally:
                done.set()
            while wait([exchanged], timeout=_PROGRESS_SECONDS).not_done:
                self.progresses()
            exchanged.result()
        return found

    def broadcast(self, leader: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the chunks of the leader; the others have none."""
        own = next(chunks, b"")
        size = self.gather([len(own)])[leader][0]
        while size:
            following = next(chunks, b"")
            # The size of the next chunk comes along, because each operation has a latency.
            x = torch.zeros(1 + -(-size // 8), dtype=torch.int64)  # [1 + size / 8]
            if self.rank == leader:
                x[0] = len(following)
                x[1:].numpy().view(np.uint8)[:size] = memoryview(own)
            came = self.sum(x).numpy()
            yield came[1:].view(np.uint8)[:size].tobytes()
            own, size = following, int(came[0])

    @abstractmethod
    def close(self) -> None:
        """Leave the group.

        Raises:
            NcclStuck: this process can no longer use its device.
        """

    @abstractmethod
    def _sum_on_host(self, x: Tensor) -> Tensor:
        """Sum a tensor on the host, as `sum` does."""


def _on_host(x: Tensor) -> Tensor:
    """Copy the tensor to the host, page-locked if from a GPU."""
    if x.device.type == "cpu":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)


def torch_message(error: BaseException) -> str:
    """Return torch's message, without source location, hints and C++ stack."""
    line = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.c(?:c|pp):\d+\] ", "", line).strip()


class Member(Protocol):
    """A learner whose state others can take over."""

    updates: int  # so far

    def save(self) -> tuple[dict[str, Tree], dict[str, Any]]:
        """Return the state for `restore`: named arrays, and JSON for the rest."""

    def restore(self, tree: Tree, extras: Mapping[str, Any]) -> None:
        """Continue from a state of `save`."""


def take_over_newest(learner: Member, peers: Peers) -> None:
    """Take over the state with the most updates (ties: lowest rank).

    If an update succeeded at only some learners, all continue from their state. With a large
    replay, a state takes long to save, hash and restore: no member counts as lost during that time.

    Raises:
        PeerLost: a learner is gone.
    """
    own_hash = peers.wait_for_all(lambda: state_hash(learner))
    states = peers.gather([learner.updates, own_hash])
    leader = max(range(peers.size), key=lambda rank: (states[rank][0], -rank))
    if all(state == states[leader] for state in states):
        return
    leads = peers.rank == leader
    # One chunk at a time: a replay is large.
    size, chunks = peers.wait_for_all(lambda: _chunks(learner) if leads else (0, iter(())))
    most_bytes = peers.gather([size])[leader][0]
    reader = FrameReader(training_pb2.StateHeader, most_bytes, digests=True)
    # Only learners that are behind read the state, but all take part in each broadcast.
    behind = states[peers.rank] != states[leader]
    frame = None
    for chunk in peers.broadcast(leader, chunks):
        frame = reader.feed(chunk) if behind else None
        peers.progresses()

    def restore() -> None:
        if frame is not None:
            learner.restore(frame.tree, json.loads(frame.header.extra))

    peers.wait_for_all(restore)


def state_hash(learner: Member) -> int:
    """Hash everything that updates change, including connectors: signed XXH3, 64 bits."""
    digest = xxhash.xxh3_64()
    tree, _ = learner.save()
    for path, array in flatten(tree):
        digest.update(repr((path, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.intdigest() - 2**63


def _chunks(learner: Member) -> tuple[int, Iterator[bytes]]:
    """Return a state's maximum size in a frame, and the frame's chunks."""
    tree, extra = learner.save()
    header = training_pb2.StateHeader(extra=json.dumps(extra))
    # Arrays are aligned in the payload, which makes it larger than their sum.
    size = sum(array.nbytes + 64 for _, array in flatten(tree))
    return size, encode_frame(header, tree, digest=True)


def mean_over_learners(
    grads: Grads, aux: Aux, total: Callable[[Tensor], Tensor]
) -> tuple[Grads, Aux]:
    """Reduce a gradient over all learners.

    Args:
        grads: this learner's gradient [P].
        aux: this learner's other results.
        total: sums a vector [B] elementwise over the learners.

    Returns:
        The gradient and other results for the samples of all learners. Metrics and priorities
        remain this learner's own.
    """
    # Float buffers are estimates. Others count passes, and are equal everywhere.
    floats = {name: x for name, x in sorted(aux.buffers.items()) if x.is_floating_point()}
    # Without a live step in the sample, buffers may hold anything.
    buffers = [torch.where(aux.live_steps > 0, x, 0.0) for x in floats.values()]  # [...]
    means = dict(sorted(aux.means.items()))
    one = grads.new_ones(1)  # [1]: its sum is the count
    parts = [grads, one, *means.values(), *buffers]  # [...]
    sizes = [part.numel() for part in parts]
    flat = grads.new_empty(sum(sizes))  # [B]
    for place, part in zip(torch.split(flat, sizes), parts, strict=True):
        torch.mul(part.reshape(-1).to(flat.dtype), aux.live_steps, out=place)
    # One reduction for everything, since each has a latency of its own.
    gradient, count, *sums = torch.split(total(flat), sizes)  # [P], [1], [...]
    steps = count.squeeze(0)  # []
    divisor = steps.clamp(min=1)  # []
    reduced = {name: sums.pop(0).squeeze(0) / divisor for name in means}  # [] each
    found = dict(aux.buffers)
    for name, buffer in floats.items():
        mean = (sums.pop(0) / divisor).view(buffer.shape).to(buffer.dtype)  # [...]
        found[name] = torch.where(steps > 0, mean, buffer)  # [...]
    live_steps = steps.round().to(aux.live_steps.dtype)  # []
    total_aux = aux._replace(live_steps=live_steps, means=reduced, buffers=found)
    return gradient.div_(divisor), total_aux
