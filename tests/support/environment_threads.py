"""Threads in place of the processes of environments: the same pipes and memory, and no start."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from juggler.envrunner.environments import environment_processes

_WHERE = environment_processes.__name__


class _Thread(threading.Thread):
    """Has its own copy of what a process would have: a pickled function and duplicated pipes."""

    exitcode = 0

    def __init__(self, target: Callable[..., None], name: str, args: tuple[Any, ...]) -> None:
        index, function, *rest = args
        own = [
            Connection(os.dup(each.fileno())) if isinstance(each, Connection) else each
            for each in rest
        ]
        sent = pickle.loads(pickle.dumps(function))  # noqa: S301
        super().__init__(target=target, name=name, args=(index, sent, *own), daemon=True)

    def kill(self) -> None:
        """Does nothing: `close` has asked it to end."""


@contextmanager
def environments_in_threads() -> Iterator[None]:
    """Vectors of environments in processes that are made in this block have threads."""
    real = multiprocessing.get_context("forkserver")
    context = SimpleNamespace(
        Array=real.Array,
        RawArray=real.RawArray,
        Pipe=real.Pipe,
        Queue=SimpleQueue,
        Process=_Thread,
        set_forkserver_preload=lambda names: None,
    )
    library = SimpleNamespace(
        get_context=lambda name: context,
        parent_process=lambda: SimpleNamespace(pid=os.getpid()),
        current_process=lambda: SimpleNamespace(_config={}),
        TimeoutError=multiprocessing.TimeoutError,
    )
    without = ("start_forkserver", "die_with", "ignore_stop_signals", "set_title")
    with (
        patch("multiprocessing.get_context", library.get_context),
        patch.multiple(_WHERE, **dict.fromkeys(without, lambda *_: None)),
        patch(f"{_WHERE}.multiprocessing", library),
    ):
        yield
