"""Peers: the other learners of a group, in one generation of it.

Learners of one host, or of a network that is trusted, communicate over torch.distributed
(`torch_peers`); learners of several hosts over encrypted streams (`ring_peers`).
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

#: Time limit of meeting, and of one operation; around a ring, of one message.
COLLECTIVE_SECONDS = 8.0
#: How often learners learn that another one still works.
_STILL_SECONDS = 1.0

T = TypeVar("T")


class PeerLost(RuntimeError):
    """A collective operation failed: a learner is gone, hanging or unreachable."""


class Peers(ABC):
    """This learner's connections to the others.

    Attributes:
        rank: of this learner.
        size: the number of learners.
        progresses: called while this learner waits for others, or sends them much: it does not
            hang, however long that takes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.progresses: Callable[[], None] = lambda: None

    def sum(self, x: Tensor) -> Tensor:
        """Sum elementwise over all learners, bitwise equal; may change x.

        Raises:
            PeerLost: a learner is gone.
            NcclStuck: the same, and this process cannot use its device any more.
        """
        return self._sum_on_host(_on_host(x)).to(x.device, non_blocking=True)

    def gather(self, values: list[int]) -> list[list[int]]:
        """All learners' values, signed 64-bit integers, by rank."""
        table = torch.zeros((self.size, len(values)), dtype=torch.int64)  # [k, n]
        table[self.rank] = torch.tensor(values)
        return self.sum(table).tolist()

    def wait_for_all(self, work: Callable[[], T]) -> T:
        """Do this learner's work, wait for the others', and return its result.

        Work may take longer than the time limit of one operation. The driver ends a learner that
        hangs in its part, after `hang_seconds`, and none that waits.

        Raises:
            PeerLost: a learner is gone.
        """
        done = threading.Event()

        def tell() -> None:
            over = False
            while not over:
                done.wait(_STILL_SECONDS)
                over = all(each for (each,) in self.gather([int(done.is_set())]))

        with ThreadPoolExecutor(1, "still-working") as pool:
            told = pool.submit(tell)
            try:
                found = work()
            finally:
                done.set()
            while wait([told], timeout=_STILL_SECONDS).not_done:
                self.progresses()
            told.result()
        return found

    @abstractmethod
    def broadcast(self, data: bytes | None, root: int, size: int) -> bytes:
        """Send `size` bytes from rank `root`; the other ranks pass None."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group.

        Raises:
            NcclStuck: this process cannot use its device any more.
        """

    @abstractmethod
    def _sum_on_host(self, x: Tensor) -> Tensor:
        """Sum a tensor on the host, as `sum` does."""


def _on_host(x: Tensor) -> Tensor:
    """Copy the tensor to the host, page-locked if from a GPU."""
    if x.device.type == "cpu":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)


def said(error: BaseException) -> str:
    """Torch's message, without source location, hints and C++ stack."""
    line = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.c(?:c|pp):\d+\] ", "", line).strip()
