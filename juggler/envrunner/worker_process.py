"""The process of an EnvRunner or a gateway."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from gymnasium.vector import VectorEnv

from juggler.envrunner.envrunner_program import EnvRunnerProgram
from juggler.runtime.actors.attachment import Attachment
from juggler.runtime.actors.resources import keep_freed_memory

#: Names of this function in OpenBLAS, and in NumPy's wheels.
_SET_THREADS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


def prepare_process(program: EnvRunnerProgram) -> tuple[Any, Any, Any]:
    """Configure the whole process -> the program's own code."""
    keep_freed_memory()
    # Small forward passes gain nothing from more threads, and runners share the cores.
    torch.set_num_threads(1)
    numpy_in_one_thread()
    if not program.own_code:
        return None, None, None
    own_code: tuple[Any, Any, Any] = cloudpickle.loads(program.own_code)
    return own_code


def numpy_in_one_thread() -> None:
    """Let NumPy multiply matrices only in the calling thread.

    This works if its library is OpenBLAS, as in its wheels. By default, OpenBLAS has one thread per
    core.
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in sorted(each for each in mapped if "openblas" in each):
        library = ctypes.CDLL(path)  # the one that NumPy has loaded
        for name in _SET_THREADS:
            with suppress(AttributeError):
                getattr(library, name)(1)


def step_back(env: VectorEnv[Any, Any, Any] | None = None) -> None:
    """Lower the priority of the calling thread and of environments' processes.

    The learner goes first, because all EnvRunners wait when it waits for a processor. Heartbeats go
    first, too. It is called after the setup, which the run waits for.
    """
    niceness = os.nice(10)
    for process in getattr(None if env is None else env.unwrapped, "processes", ()):
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)


def index_of(attachment: Attachment) -> int:
    """Return the number of a worker among the workers of its role."""
    return int(attachment.worker_id.rpartition("-")[2])
