"""A worker on another host that has lost its driver: it waits for the driver or for a successor."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from juggler.runtime.actors.attempts import attempts
from juggler.runtime.actors.endpoints import split_address
from juggler.runtime.actors.logs import WorkerLog
from juggler.runtime.actors.processes import must_end
from juggler.runtime.actors.worker import Contact, LostTheDriver, heeded_signals

#: Environment variable of a program that replaces a worker: that worker's incarnation.
PREDECESSOR = "JUGGLER_PREDECESSOR"
_LINE_SECONDS = 30.0
_LEAVE_SECONDS = 20.0  # for finalizers, which take their time on a busy machine


def work(contact: Contact, main: Callable[[], None]) -> None:
    """Work until the driver says that the run is over. If the driver is lost, wait until somebody
    listens at its address, and then start again as a new program. All that passes from the old
    program to the new one is a learner's state.

    Args:
        contact: how the worker reaches its driver, and how long it waits.
        main: the worker's main function.

    Raises:
        LostTheDriver: nobody came back.
    """
    try:
        main()
    except LostTheDriver as lost:
        if not contact.reattach_seconds or not _is_back(contact):
            raise
        os.environ[PREDECESSOR] = lost.incarnation
        _begin_anew()
    except BaseException:
        must_end(_LEAVE_SECONDS)
        raise


def _is_back(contact: Contact) -> bool:
    """Wait until somebody listens at the driver's address."""
    driver, log = contact.address, contact.log or WorkerLog("worker")
    for number in heeded_signals():  # nothing is left to end in order
        signal.signal(number, _end)
    said = time.monotonic()
    log.info(f"waiting up to {contact.reattach_seconds:.0f} s for a driver at {driver}")
    for _ in attempts(contact.reattach_seconds):
        try:
            socket.create_connection(split_address(driver), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() - said > _LINE_SECONDS:
                said = time.monotonic()
                log.info(f"no driver at {driver} yet ({error})")
        else:
            return True
    log.error(f"nobody came back within {contact.reattach_seconds:.0f} s")
    return False


def _end(number: int, _: object) -> NoReturn:
    """End this process by a signal, also as process 1, which has no default handlers."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _begin_anew() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
