"""Starts local worker processes from a forkserver, and ends them."""

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
import time
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, NoReturn

from juggler.runtime.actors.resources import stat_fields
from juggler.runtime.actors.stop_signals import ignore_stop_signals, stop_signals_held
from juggler.runtime.actors.temporary import claim_multiprocessings

_SYS_PIDFD_OPEN = 434  # on every architecture except Alpha
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILLED_SECONDS = 5.0  # until killed processes are gone; the kernel may delay one
_LOOK_SECONDS = 0.005
_CLAIM_SECONDS = 0.05  # between the two checks that must both find a child unclaimed


def die_with(pid: int) -> None:
    """End this process, at once and without clean-up, when process `pid` ends.

    For a process whose parent is a forkserver and whose owner is `pid`: the kernel's parent-death
    signal would watch the forkserver.

    Raises:
        OSError: the kernel does not let this process watch `pid`.
    """
    try:
        descriptor = process_descriptor(pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(
        target=_exit_after, args=(descriptor,), name=f"die with {pid}", daemon=True
    ).start()


def process_descriptor(pid: int) -> int:
    """Open a descriptor that becomes readable when a process has ended.

    Raises:
        ProcessLookupError: it has ended, and its exit status is no longer known.
        OSError: the kernel does not let this process watch it.
    """
    # Some Pythons were built with headers without it.
    if (opened := getattr(os, "pidfd_open", None)) is not None:
        return int(opened(pid))
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_SYS_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor  # the kernel closes it on exec


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process `number` when its parent thread ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Adopt every descendant process that loses its parent.

    Otherwise the first process of the system or container would become the parent, and the
    orphan's origin would be lost.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children(parent: int, but: Callable[[], Collection[int]] | None = None) -> None:
    """Kill the children of a process that adopts orphans.

    In the end, all descendants of the process are killed.

    Args:
        parent: the process.
        but: returns the children to keep, with their descendants. It may learn of a child only
            some milliseconds after the fork.
    """
    deadline = time.monotonic() + _KILLED_SECONDS
    nothing = 0  # times in a row; one check may miss a child that is being adopted
    while nothing < 2 and time.monotonic() < deadline:
        found = children(parent) if but is None else _unclaimed(parent, but)
        for pid in found:
            with contextlib.suppress(OSError):  # it has ended, or now belongs to another user
                os.kill(pid, signal.SIGKILL)
        nothing = 0 if found else nothing + 1
        if found:
            time.sleep(_LOOK_SECONDS)  # their children then belong to the parent


def children(parent: int) -> set[int]:
    """List the child processes with at least one running thread."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = stat_fields(pid)
            ended = fields[0] in "ZX" and int(fields[17]) <= 1
            if int(fields[1]) == parent and not ended:
                found.add(int(pid))
    return found


def _unclaimed(parent: int, but: Callable[[], Collection[int]]) -> set[int]:
    """Return children that stay unclaimed for some time."""
    # After each listing, so that no child is newer than the claims.
    found = children(parent).difference(but())
    if found:
        time.sleep(_CLAIM_SECONDS)
        found &= children(parent).difference(but())
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _exit_after(descriptor: int) -> None:
    wait([descriptor])
    os._exit(1)


#: Imported once by the forkserver, and shared by all workers; see `forkserver`. At import, these
#: modules must not create anything that a fork would break: no gRPC channel or server, no CUDA, no
#: torch operation, no thread.
PRELOAD = (
    "torch",
    "gymnasium",
    "juggler.driver.rehearsal",
    "juggler.envrunner.envrunner_worker",
    "juggler.learner.process.learner_worker",
)
#: Modules that multiprocessing imports there. Errors other than ImportError end the forkserver.
_OF_FORKSERVER = (
    "juggler.runtime.actors.ignore_stop_signals",
    "juggler.runtime.actors.forkserver",
)

#: Signal that ends the forkserver and its descendants. Nothing else sends this signal, and it also
#: ends a process that has no handler for it yet.
END_SIGNAL = signal.SIGRTMIN + 7
_END_SECONDS = 3.0  # for the forkserver to end; it may be stopped
_LOCK_SECONDS = 1.0  # to wait for a start under way
_LEAVE_SECONDS = 5.0
_LONGEST_SECONDS = 1e9  # of a timer of the kernel
_LONGEST_WORDS = 1000  # characters

_start_lock = threading.Lock()
_workers: dict[int, Connection] = {}  # by process id: receives its last message
_own = 0  # process id of the forkserver that Juggler started; other forkservers are not ours
_sharing = 0  # number of users of this process's forkserver
# A separate lock: a start that waits for a forkserver holds the other lock until the forkserver
# has ended.
_sharing_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """The program of a local worker process.

    Attributes:
        target: "package.module:function", called with `argument`.
        argument: picklable; sent to the child through multiprocessing's own pipe.
    """

    target: str
    argument: object

    def start(self, title: str) -> ForkServerProcess:
        """Start a worker process that dies with this one.

        It is not a daemon, because it may have children.

        Call `ended` when it has ended.
        """
        words, its_end = multiprocessing.Pipe(duplex=False)
        arguments = (self, title, its_end)
        process = forkserver().Process(target=_run, args=arguments, name=title, daemon=False)
        with _start_lock, hidden_main(), its_end, _ours_if_new():
            start_forkserver()
            process.start()
            assert process.pid is not None
            _workers[process.pid] = words
        return process

    @staticmethod
    def ended(process: ForkServerProcess) -> str:
        """Kill the descendants of a process that has ended for any reason.

        Returns:
            Its error message, if it could still send one.
        """
        assert process.pid is not None
        # A start that waits for the forkserver may hold the lock until the forkserver and its
        # descendants have ended.
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


def forkserver() -> ForkServerContext:
    """Return the context from which local workers start; starts nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_OF_FORKSERVER))
    return context


def warm_up() -> None:
    """Start the forkserver now.

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
    """Return the current forkserver's process id, or 0."""
    from multiprocessing import forkserver as module

    server: Any = module._forkserver  # type: ignore[attr-defined,unused-ignore]
    return server._forkserver_pid or 0


def cool_down() -> None:
    """End the forkserver and its descendants, and wait for their end.

    A start under way fails; the next start makes a new forkserver. A forkserver that the
    surrounding program started before Juggler stays. If it has child processes of that program,
    only its other descendants end.
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
        # It may not answer: it may still be importing, or be stopped, while `start` waits for it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, END_SIGNAL)
            if not _ends(server._forkserver_pid, _END_SECONDS):
                os.kill(server._forkserver_pid, signal.SIGKILL)
    with _start_lock, contextlib.suppress(FileNotFoundError):  # its socket was removed
        server._stop()


def share_forkserver() -> None:
    """Like `warm_up`, for a caller that will call `release_forkserver`."""
    global _sharing
    with _sharing_lock:
        _sharing += 1
    warm_up()


def release_forkserver() -> None:
    """Like `cool_down`, once no other user is left."""
    global _sharing
    with _sharing_lock:  # no new user may join a forkserver that is about to end
        _sharing -= 1
        if not _sharing:
            cool_down()


def must_end(seconds: float = _LEAVE_SECONDS) -> None:
    """End this process within some seconds, even if its threads hang.

    0 cancels this.

    The kernel does it, because a process without memory or threads could not.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, _LONGEST_SECONDS))


def leave(code: int | str | None) -> NoReturn:
    """End this process like `sys.exit(code)` in its main thread.

    The interpreter is not finalized. multiprocessing ends its processes in the same way.

    Threads may still be in C++ code: of streams, of gRPC (which cannot be joined), and of
    environments. Up to Python 3.13, a thread that returns to Python during finalization is unwound;
    if C++ does not allow that, the process aborts although its work is done. The usual steps still
    happen: non-daemon threads are joined, `atexit` functions are called, and output is flushed.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # Python and multiprocessing use these two; they have no public names.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # They may no longer have a reader, and a process without a terminal may have no streams.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # output of C code
    os._exit(code if isinstance(code, int) else int(code is not None))


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running this process's main script again in its children.

    They import what they need by name, or get it by cloudpickle, so a script needs no `if __name__
    == "__main__"` guard.
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
    """Mark a forkserver that is started in the `with` block as Juggler's."""
    global _own
    before = forkserver_pid()
    yield
    if (now := forkserver_pid()) != before:
        _own = now


def _is_ours() -> bool:
    """Return whether Juggler started the current forkserver."""
    return forkserver_pid() == _own != 0


def _of_the_script() -> set[int]:
    """Return processes that the program itself started with multiprocessing."""
    found = set()
    # Not `active_children`, which takes exit codes for which other threads wait.
    for each in list(multiprocessing.process._children):  # type: ignore[attr-defined]
        with contextlib.suppress(ValueError):  # another thread is closing it
            found.add(each.pid)
    return found - _workers.keys()


def _ends(pid: int, seconds: float) -> bool:
    """Return whether a child ends within some seconds."""
    descriptor = process_descriptor(pid)
    try:
        return bool(wait([descriptor], seconds))
    finally:
        os.close(descriptor)


def _run(program: WorkerProgram, title: str, words: Connection) -> None:
    # Our forkserver imports this first; it ends with the driver.
    ours = sys.modules.get("juggler.runtime.actors.forkserver")
    die_with_parent()
    if os.getppid() == 1 or (ours is not None and os.getppid() != ours.PID):
        os._exit(1)
    # Orphans of an environment's processes belong to this worker as long as it lives.
    adopt_orphans()
    set_title(title)
    ignore_stop_signals()
    # An environment's output must not mix with lines that a program reads.
    with contextlib.suppress(OSError):  # without stderr
        os.dup2(2, 1)
    module, _, function = program.target.partition(":")
    try:
        if ours is not None and ours.failure is not None:
            raise ours.failure
        getattr(importlib.import_module(module), function)(program.argument)
    except BaseException as error:
        text = _why(error)[:_LONGEST_WORDS].encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            words.send_bytes(text)
        raise
    finally:
        must_end()


def _why(error: BaseException) -> str:
    """Describe why a process ends, for people."""
    if isinstance(error, SystemExit):
        return str(error.__cause__ or (error.code if isinstance(error.code, str) else ""))
    return f"{type(error).__name__}: {error}"
