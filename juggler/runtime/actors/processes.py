"""Local worker processes from a forkserver."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
from typing import Any, NoReturn

from juggler.runtime.actors.orphans import (
    children,
    die_with_parent,
    kill_children,
    process_descriptor,
    take_in_orphans,
)
from juggler.runtime.actors.stop_signals import ignore_stop_signals, stop_signals_held
from juggler.runtime.actors.temporary import claim_multiprocessings

#: Imported once by the forkserver, and shared by all workers; see `preloaded`. These modules must
#: not do anything at import that a fork would break: no channel or server of gRPC, no CUDA, no
#: torch operation, no thread.
PRELOAD = (
    "torch",
    "gymnasium",
    "juggler.driver.rehearsal",
    "juggler.envrunner.envrunner_worker",
    "juggler.learner.process.learner_worker",
)
#: What multiprocessing imports there. It ends the forkserver at an error other than ImportError.
_OF_FORKSERVER = (
    "juggler.runtime.actors.heedless",
    "juggler.runtime.actors.forkserver",
    "juggler.runtime.actors.preloaded",
)

#: Ends the forkserver and everything below it. Nobody else sends this signal, and it also ends a
#: process that has no handler for it yet.
END_SIGNAL = signal.SIGRTMIN + 7
_END_SECONDS = 3.0  # for the forkserver to do that; it may be stopped
_LOCK_SECONDS = 1.0  # for a start under way
_LEAVE_SECONDS = 5.0
_LONGEST_WORDS = 1000  # characters

_start_lock = threading.Lock()
_workers: dict[int, Connection] = {}  # by process id: receives its last words
_own = 0  # process id of the forkserver that Juggler started; others are not ours
_sharing = 0  # users of the forkserver, of which a process has one
# A lock of its own: a start that waits for a forkserver holds the other one until that has ended.
_sharing_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """The program of a local worker process.

    Attributes:
        target: "package.module:function", called with `argument`.
        argument: picklable; goes to the child through multiprocessing's own pipe.
    """

    target: str
    argument: object


def forkserver() -> ForkServerContext:
    """The context that local workers start from. This alone starts nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_OF_FORKSERVER))
    return context


def warm_up() -> None:
    """Start the forkserver now, so that its imports overlap with the caller's next work.

    It dies with the thread that calls this.
    """
    forkserver()
    with _start_lock, _ours_if_new():
        start_forkserver()


def start_forkserver() -> None:
    """Start a forkserver that ignores stop signals, unless one is running."""
    from multiprocessing import forkserver as module
    from multiprocessing import resource_tracker

    claim_multiprocessings()
    with stop_signals_held():  # the tracker ignores all stop signals except SIGHUP
        resource_tracker.ensure_running()  # unblocks the other signals in this process
        with stop_signals_held():
            module.ensure_running()


def forkserver_pid() -> int:
    """Process id of the current forkserver; 0 if there is none."""
    from multiprocessing import forkserver as module

    server: Any = module._forkserver  # type: ignore[attr-defined,unused-ignore]
    return server._forkserver_pid or 0


def cool_down() -> None:
    """End the forkserver and everything below it, and wait until it is gone.

    A start that is under way fails; the next start makes a new forkserver. A forkserver stays that
    the surrounding program started before Juggler. One that has processes of that program below
    stays for them, and everything else below it ends.
    """
    from multiprocessing import forkserver as module

    if not _is_ours():
        return
    if children(forkserver_pid()) & _of_the_script():
        kill_children(forkserver_pid(), but=_of_the_script)
        return
    # multiprocessing has no public way to do this.
    server: Any = module._forkserver
    if server._forkserver_pid is not None:
        # It need not answer: it may still be importing, or be stopped, while `start` waits for it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, END_SIGNAL)
            if not _ends(server._forkserver_pid, _END_SECONDS):
                os.kill(server._forkserver_pid, signal.SIGKILL)
    with _start_lock, contextlib.suppress(FileNotFoundError):  # somebody removed its socket
        server._stop()


def share_forkserver() -> None:
    """Like `warm_up`, for a caller that will call `let_go_of_forkserver`."""
    global _sharing
    with _sharing_lock:
        _sharing += 1
    warm_up()


def let_go_of_forkserver() -> None:
    """Like `cool_down`, once no other user is left."""
    global _sharing
    with _sharing_lock:  # nobody new may share what is about to end
        _sharing -= 1
        if not _sharing:
            cool_down()


def start(program: WorkerProgram, title: str) -> ForkServerProcess:
    """Start a worker process that dies with this one. It is not a daemon, because it may have
    children.

    Call `ended` when the process has ended.
    """
    words, its_end = multiprocessing.Pipe(duplex=False)
    arguments = (program, title, its_end)
    process = forkserver().Process(target=_run, args=arguments, name=title, daemon=False)
    with _start_lock, hidden_main(), its_end, _ours_if_new():
        start_forkserver()
        process.start()
        assert process.pid is not None
        _workers[process.pid] = words
    return process


def ended(process: ForkServerProcess) -> str:
    """Kill what a process started, after its own end, however it ended.

    Returns:
        Its error message, if it could still send one.
    """
    assert process.pid is not None
    # A start that waits for the forkserver may hold the lock until the forkserver, and all below
    # it, has ended.
    if not _start_lock.acquire(timeout=_LOCK_SECONDS):
        return ""
    try:
        words = _workers.pop(process.pid, None)
        if _is_ours():
            kill_children(forkserver_pid(), but=lambda: {*_workers, *_of_the_script()})
    finally:
        _start_lock.release()
    if words is None:
        return ""
    with words, contextlib.suppress(EOFError, OSError):
        return words.recv_bytes().decode() if words.poll() else ""
    return ""


def must_end(seconds: float = _LEAVE_SECONDS) -> None:
    """Let this process end within some seconds, whatever its threads and finalizers wait for; 0
    cancels this.

    The kernel does it, because a process without memory or threads could not.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def leave(code: int | str | None) -> NoReturn:
    """End this process as `sys.exit(code)` in its main thread would, but without taking the
    interpreter apart; multiprocessing ends those that it starts in the same way.

    Threads may still be in C++ code then: those of streams, of gRPC, which gives nobody its own to
    join, and of other people's environments. Up to Python 3.13, a thread that comes back to Python
    while the interpreter is taken apart is unwound, and where C++ does not allow that the process
    aborts, though its work is done. What everybody else relies on still happens: threads that are
    no daemons end, what is registered with `atexit` is called, and output is written.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # Python and multiprocessing use these two; they have no public names.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Nobody may read them any more, and a process without a terminal may have none.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # what C code has printed
    os._exit(code if isinstance(code, int) else int(code is not None))


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running this process's main script again in its children.

    What they need of it is imported by name or travels by cloudpickle, so a script needs no `if
    __name__ == "__main__"` guard.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


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
    """Whether Juggler started the current forkserver."""
    return forkserver_pid() == _own != 0


def _of_the_script() -> set[int]:
    """Processes that the surrounding program started with multiprocessing, as for a DataLoader."""
    found = set()
    # Not `active_children`, which takes exit codes for which other threads wait.
    for each in list(multiprocessing.process._children):  # type: ignore[attr-defined]
        with contextlib.suppress(ValueError):  # another thread closes it
            found.add(each.pid)
    return found - _workers.keys()


def _ends(pid: int, seconds: float) -> bool:
    """Whether a child ends within some seconds."""
    descriptor = process_descriptor(pid)
    try:
        return bool(wait([descriptor], seconds))
    finally:
        os.close(descriptor)


def _run(program: WorkerProgram, title: str, words: Connection) -> None:
    # Our forkserver imports this first of all; it ends with the driver.
    ours = sys.modules.get("juggler.runtime.actors.forkserver")
    preloaded = sys.modules.get("juggler.runtime.actors.preloaded")
    die_with_parent()
    if os.getppid() == 1 or (ours is not None and os.getppid() != ours.PID):
        os._exit(1)
    # Orphans of what an environment starts stay this worker's as long as it lives.
    take_in_orphans()
    set_title(title)
    ignore_stop_signals()
    # What an environment prints must not come between lines that a program reads.
    with contextlib.suppress(OSError):  # there is no stderr
        os.dup2(2, 1)
    module, _, function = program.target.partition(":")
    try:
        if preloaded is not None and preloaded.failure is not None:
            raise preloaded.failure
        getattr(importlib.import_module(module), function)(program.argument)
    except BaseException as error:
        text = _why(error)[:_LONGEST_WORDS].encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            words.send_bytes(text)
        raise
    finally:
        must_end()


def _why(error: BaseException) -> str:
    """Why a process ends, for people."""
    if isinstance(error, SystemExit):
        return str(error.__cause__ or (error.code if isinstance(error.code, str) else ""))
    return f"{type(error).__name__}: {error}"
