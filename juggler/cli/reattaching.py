"""A worker on its own whose driver is gone: waits for it, or for another one in its place."""

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
from juggler.runtime.actors.worker import Contact, LostTheDriver

#: In the environment of a program that takes the place of a worker: that one's incarnation.
PREDECESSOR = "JUGGLER_PREDECESSOR"
_LINE_SECONDS = 30.0


def work(contact: Contact, main: Callable[[], None]) -> None:
    """Work until the driver says that it is enough. If the driver is lost, begin anew as soon as
    somebody listens there again: as a new program, which has nothing of the old one but what that
    kept for it.

    Args:
        contact: of the worker, which says how long to wait.
        main: of the worker.

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
        must_end()
        raise


def _is_back(contact: Contact) -> bool:
    """Waits until somebody listens there."""
    driver, log = contact.address, contact.log or WorkerLog("worker")
    for number in (signal.SIGTERM, signal.SIGINT):  # there is nothing to be ended in order
        signal.signal(number, signal.SIG_DFL)
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


def _begin_anew() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
