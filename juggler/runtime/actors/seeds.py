"""One seed for a run, a different one for each of its workers."""

from __future__ import annotations

import zlib

import numpy as np


def worker_seed(run_seed: int, role: str, index: int, life: int = 1, update: int = 0) -> int:
    """A worker's own seed: the same arguments give the same one, others give another.

    Args:
        run_seed: of the whole run, at least 0.
        role: of the worker, such as "envrunner".
        index: of the worker within its role, at least 0.
        life: which of the processes at this post: a replacement must not repeat its
            predecessor's episodes.
        update: that the run had got to when the worker began, as a process or anew: a resumed run
            must not repeat its own first episodes.

    Returns:
        64 random bits.
    """
    key = (zlib.crc32(role.encode()), index, life, update)
    sequence = np.random.SeedSequence(run_seed, spawn_key=key)
    return int(sequence.generate_state(1, np.uint64)[0])
