"""Threads in place of local worker processes, so that a run starts no process."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

from juggler.runtime.actors import processes

_numbers = count(1 << 23)  # beyond all process ids of Linux


class _Copy:
    """A file descriptor that is sent to a process of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def detach(self) -> int:
        return self._descriptor


class _Sending:
    """What multiprocessing asks while it pickles the arguments of a process."""

    DupFd = _Copy
    duplicate_for_child = staticmethod(os.dup)


def _sent(arguments: Any) -> Any:
    """Arguments as another process would have them, with descriptors of their own."""
    set_spawning_popen(_Sending())
    try:
        return pickle.loads(ForkingPickler.dumps(arguments))  # noqa: S301
    finally:
        set_spawning_popen(None)


class _Thread(threading.Thread):
    """What `multiprocessing.Process` is to its owner."""

    exitcode: int | None = None
    pid: int | None = None

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool
    ) -> None:
        super().__init__(target=target, args=_sent(args), name=name, daemon=True)
        self.sentinel, self._end = os.pipe()

    def start(self) -> None:
        self.pid = next(_numbers)
        super().start()

    def run(self) -> None:
        code: Any = 1
        try:
            super().run()
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            pass  # its owner reads the last words
        finally:
            self.exitcode = code if isinstance(code, int) else int(code is not None)
            os.close(self._end)

    def kill(self) -> None:
        """Ends it as soon as it is in Python."""
        if self.is_alive():
            number, error = ctypes.c_ulong(self.ident or 0), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)

    def __del__(self) -> None:
        os.close(self.sentinel)


def _run(program: processes.WorkerProgram, _: str, words: Connection) -> None:
    module, _, function = program.target.partition(":")
    try:
        getattr(importlib.import_module(module), function)(program.argument)
    except BaseException as error:
        with suppress(OSError):
            words.send_bytes(processes._why(error).encode("utf-8", "backslashreplace"))
        raise
    finally:
        words.close()


def _exit(code: int) -> NoReturn:
    raise SystemExit(code)


_signal = signal.signal


def _heed(number: int, handler: Any) -> Any:
    """Leaves signals to the thread that may handle them."""
    own = threading.current_thread() is threading.main_thread()
    return _signal(number, handler) if own else signal.SIG_DFL


@contextmanager
def workers_in_threads() -> Iterator[None]:
    """Local workers that start in this block are threads of this process."""
    context = SimpleNamespace(Process=_Thread)
    with (
        patch.object(processes, "forkserver", lambda: context),
        patch.object(processes, "start_forkserver", processes.claim_multiprocessings),
        patch.object(processes, "_run", _run),
        # What a worker does to its process.
        patch("os._exit", _exit),
        patch("signal.signal", _heed),
        patch("signal.setitimer"),
        patch("faulthandler.enable"),
        patch("setproctitle.setproctitle"),
    ):
        yield
