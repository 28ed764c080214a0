"""Seeds of workers, which are derived from the run's seed."""

from __future__ import annotations

import zlib

import numpy as np


def worker_seed(run_seed: int, role: str, index: int, life: int = 1, update: int = 0) -> int:
    """A worker's own seed: the same arguments give the same seed, others give another.

    Args:
        run_seed: of the whole run, at least 0.
        role: of the worker, such as "envrunner".
        index: of the worker within its role, at least 0.
        life: counts the processes with this worker id: a replacement must not repeat its
            predecessor's episodes.
        update: the update at which the worker began: a resumed run must not repeat its own first
            episodes.

    Returns:
        64 random bits.
    """
    key = (zlib.crc32(role.encode()), index, life, update)
    sequence = np.random.SeedSequence(run_seed, spawn_key=key)
    return int(sequence.generate_state(1, np.uint64)[0])
