"""Forkservers and supervised processes of tests, and workers that are threads."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

from juggler.runtime.actors import processes
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.actors.processes import WorkerProgram
from juggler.runtime.actors.supervisor import Exited, RestartPolicy


def end_forkserver() -> None:
    """End the forkserver; the next user starts another one."""
    processes.cool_down()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()  # one that is not Juggler's


def have_jugglers_forkserver() -> None:
    """Start Juggler's forkserver, which has imported torch, if it is missing."""
    if not processes._is_ours():
        end_forkserver()
    processes.warm_up()
    # It answers once it has imported what workers need.
    process = processes.WorkerProgram("time:sleep", 0.0).start("warm")
    process.join()
    processes.WorkerProgram.ended(process)


QUICK = RestartPolicy(first_delay=0.01, longest_delay=0.05, quarantine_after=3)
NEVER = RestartPolicy(quarantine_after=1)


def eventually(what: Callable[[], Any], otherwise: str = "it never came to that") -> Any:
    """Poll `what` until its result is true, and return that.

    Threads report changes (`support.changes`); processes of slow tests do not.
    """
    deadline = time.monotonic() + 90.0
    while time.monotonic() < deadline:
        time.sleep(0.02)  # before the first look, too: so it fails in the gate every time
        if result := what():
            return result
    raise AssertionError(otherwise)


class Exits:
    """What a supervisor tells, one after the other."""

    def __init__(self) -> None:
        self.events: Mailbox[Any] = Mailbox()
        self._waiting: list[Any] = []

    def next(self, seconds: float = 90.0) -> Exited:
        deadline = time.monotonic() + seconds
        while not self._waiting and time.monotonic() < deadline:
            self._waiting += self.events.gather(deadline - time.monotonic())
        assert self._waiting, "nothing ended"
        exited = self._waiting.pop(0)
        assert isinstance(exited, Exited)
        return exited


def sleeper() -> WorkerProgram:
    return WorkerProgram("time:sleep", 60)


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
