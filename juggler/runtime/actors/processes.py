"""Local worker processes from a forkserver."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from juggler.runtime.actors.orphans import die_with_parent, kill_children, take_in_orphans
from juggler.runtime.actors.temporary import claim_multiprocessings

#: Imported by the forkserver once, and shared by all workers. These must run nothing at import
#: that a fork would break: no gRPC, no CUDA, no torch operation.
PRELOAD = (
    "juggler.runtime.actors.forkserver",
    "torch",
    "gymnasium",
    "juggler.runtime.connectors.building",
    "juggler.runtime.modules.building",
)

#: Ends the forkserver, and all below it. One that nobody else sends: where it means nothing yet, it
#: ends a process too.
END_SIGNAL = signal.SIGRTMIN + 7
_END_SECONDS = 3.0  # for the forkserver to begin and end that; it may be stopped
_LOCK_SECONDS = 1.0  # for a start under way
_LEAVE_SECONDS = 5.0
_LONGEST_WORDS = 1000  # characters

_start_lock = threading.Lock()
_workers: dict[int, Connection] = {}  # by process id: what it says last
_own = 0  # process id of the forkserver that was started here; another one is somebody else's
_sharing = 0  # how many share the forkserver, of which a process has one
# Of its own: a start that waits for a forkserver holds the other one until that is ended.
_sharing_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """What a local worker process runs.

    Attributes:
        target: "package.module:function", called with `argument`.
        argument: picklable; goes to the child through multiprocessing's own pipe.
    """

    target: str
    argument: object


def forkserver() -> ForkServerContext:
    """The context that local workers start from. Starts nothing by itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def warm_up() -> None:
    """Start the forkserver now, so that its imports overlap with what the caller does next.

    It dies with the thread that calls this.
    """
    from multiprocessing import forkserver as module
    from multiprocessing import resource_tracker

    forkserver()
    claim_multiprocessings()
    with _start_lock:
        resource_tracker.ensure_running()  # which lets interrupts through where it starts
        # One that came before the forkserver can ignore it would end it, with a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _ours_if_new():
                module.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forkserver_pid() -> int:
    """Of the forkserver that there is now; 0: none."""
    from multiprocessing import forkserver as module

    server: Any = module._forkserver  # type: ignore[attr-defined,unused-ignore]
    return server._forkserver_pid or 0


def cool_down() -> None:
    """End the forkserver, and all below it, and wait until it is gone.

    A start that is under way fails; the next one makes a new forkserver. One that was there before,
    of the program that Juggler runs in, stays.
    """
    from multiprocessing import forkserver as module

    if not _is_ours():
        return
    # multiprocessing has no public way to do this.
    server: Any = module._forkserver
    if server._forkserver_pid is not None:
        # It need not answer: it may be importing still, or be stopped, while `start` waits for it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, END_SIGNAL)
            if not _ends(server._forkserver_pid, _END_SECONDS):
                os.kill(server._forkserver_pid, signal.SIGKILL)
    with _start_lock, contextlib.suppress(FileNotFoundError):  # its socket, which somebody removed
        server._stop()


def share_forkserver() -> None:
    """As `warm_up`, for somebody who will let go of it."""
    global _sharing
    with _sharing_lock:
        _sharing += 1
    warm_up()


def let_go_of_forkserver() -> None:
    """As `cool_down`, once nobody shares it any more."""
    global _sharing
    with _sharing_lock:
        _sharing -= 1
        last = not _sharing
    if last:
        cool_down()


def start(program: WorkerProgram, title: str) -> ForkServerProcess:
    """Start a worker process that dies with this one. Not a daemon: it may own subprocesses.

    Whoever waits for its end says so to `ended`.
    """
    claim_multiprocessings()
    words, its_end = multiprocessing.Pipe(duplex=False)
    arguments = (program, title, its_end)
    process = forkserver().Process(target=_run, args=arguments, name=title, daemon=False)
    with _start_lock, hidden_main(), its_end, _ours_if_new():
        process.start()
        assert process.pid is not None
        _workers[process.pid] = words
    return process


def ended(process: ForkServerProcess) -> str:
    """Let what this process started end with it, however it ended.

    Returns:
        What it failed with, if it could still say so.
    """
    assert process.pid is not None
    # A start that waits for the forkserver may hold the lock: until that is ended, with all below.
    if not _start_lock.acquire(timeout=_LOCK_SECONDS):
        return ""
    try:
        words = _workers.pop(process.pid, None)
        if _is_ours():
            kill_children(forkserver_pid(), but=_workers)
    finally:
        _start_lock.release()
    if words is None:
        return ""
    with words, contextlib.suppress(EOFError, OSError):
        return words.recv_bytes().decode() if words.poll() else ""
    return ""


def must_end(seconds: float = _LEAVE_SECONDS) -> None:
    """Let this process end within so many seconds, whatever its threads and finalizers wait for;
    0: it may go on.

    The kernel sees to it: a process that is out of memory or threads could not.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running this process's main script again in its children.

    What they need of it is named or travels by cloudpickle, so that a script needs no
    `if __name__ == "__main__"` guard.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def ignore_stop_signals() -> None:
    """A terminal sends Ctrl-C, and a service manager SIGTERM, to every process of a run.

    The driver alone decides what that means; what ends with it must not end before it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def set_title(title: str) -> None:
    import setproctitle

    setproctitle.setproctitle(f"juggler: {title}")


@contextmanager
def _ours_if_new() -> Iterator[None]:
    """A forkserver that is started meanwhile is Juggler's."""
    global _own
    before = forkserver_pid()
    yield
    if (now := forkserver_pid()) != before:
        _own = now


def _is_ours() -> bool:
    """Whether there is a forkserver that was started here, and so does what ours do."""
    return forkserver_pid() == _own != 0


def _ends(pid: int, seconds: float) -> bool:
    """Whether a child does, within so many seconds."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(wait([descriptor], seconds))
    finally:
        os.close(descriptor)


def _run(program: WorkerProgram, title: str, words: Connection) -> None:
    # What ours has imported, first of all; it ends with the driver.
    ours = sys.modules.get("juggler.runtime.actors.forkserver")
    die_with_parent()
    if os.getppid() == 1 or (ours is not None and os.getppid() != ours.PID):
        os._exit(1)
    # What an environment starts, and leaves to itself, stays this worker's as long as it lives.
    take_in_orphans()
    set_title(title)
    ignore_stop_signals()
    module, _, function = program.target.partition(":")
    try:
        getattr(importlib.import_module(module), function)(program.argument)
    except BaseException as error:
        text = _why(error)[:_LONGEST_WORDS].encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            words.send_bytes(text)
        raise
    finally:
        must_end()


def _why(error: BaseException) -> str:
    """A process ends by this: for people."""
    if isinstance(error, SystemExit):
        return str(error.__cause__ or (error.code if isinstance(error.code, str) else ""))
    return f"{type(error).__name__}: {error}"
