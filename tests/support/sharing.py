"""Peers that share memory with a learner, controlled by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

from juggler.runtime.streams.episodes import EpisodeSender
from support.learner_end import LearnerEnd, Senders, header, tree

SIZE = 40_000  # elements of float32
FURTHER = count(1_000_000)  # batch ids


_of_others: set[str] = set()


def disregard_memories() -> None:
    """Ignore memory that other tests have left, from now on."""
    _of_others.clear()
    _of_others.update(mapped(), _inodes())


def mapped() -> set[str]:
    """The shared memories that this process has mapped, by their inodes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:juggler" in line} - _of_others


def lies_in_shared_memory(array: np.ndarray) -> bool:
    """Whether an array is a view of mapped shared memory."""
    at = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= at < end:
            return "memfd:juggler" in line
    return False


def open_memories() -> int:
    """How many of this process's open files are shared memory."""
    return sum(inode not in _of_others for inode in _inodes())


def _inodes() -> Iterator[str]:
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed
            if "memfd:juggler" in os.readlink(f"/proc/self/fd/{each}"):
                yield str(os.stat(f"/proc/self/fd/{each}").st_ino)


def send_each(senders: Senders, sender: EpisodeSender, *batch_ids: int, size: int = SIZE) -> None:
    """Send one batch after the other."""
    for batch_id in batch_ids:
        sender.send(header(batch_id), tree(batch_id, size))
        assert senders.wait_for(batch_id)[batch_id] == ("", "")


def begin_to_share(learner: LearnerEnd, senders: Senders) -> EpisodeSender:
    """A sender that has begun to share memory."""
    sender = senders.open(learner.address)

    # A mapping alone may be of a sender that only tries whether memory can be shared.
    def lies_in_memory() -> bool:
        send_each(senders, sender, next(FURTHER))
        return lies_in_shared_memory(learner.taken[-1].tree["default"]["observations"])

    while not lies_in_memory():
        pass
    learner.taken.clear()
    return sender
