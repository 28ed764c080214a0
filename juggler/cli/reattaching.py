"""A worker on its own whose driver is gone: waits for it, or for another one in its place."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from juggler.runtime.actors.endpoints import split_address
from juggler.runtime.actors.logs import WorkerLog
from juggler.runtime.actors.worker import Contact, LostTheDriver

#: In the environment of a program that takes the place of a worker: that one's incarnation.
PREDECESSOR = "JUGGLER_PREDECESSOR"
_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 15.0
_LINE_SECONDS = 30.0


def work(contact: Contact, patience: float, main: Callable[[], None]) -> None:
    """Work until the driver says that it is enough. If the driver is lost, begin anew as soon as
    somebody listens there again: as a new program, which has nothing of the old one but what that
    kept for it.

    Args:
        contact: of the worker.
        patience: seconds to wait for it; 0: not at all.
        main: of the worker.

    Raises:
        LostTheDriver: nobody came back.
    """
    try:
        main()
    except LostTheDriver as lost:
        if not patience or not _is_back(contact, patience):
            raise
        os.environ[PREDECESSOR] = lost.incarnation
        _begin_anew()


def _is_back(contact: Contact, patience: float) -> bool:
    """Waits until somebody listens there, with back-off so that not all workers come at once."""
    driver, log = contact.address, contact.log or WorkerLog("worker")
    for number in (signal.SIGTERM, signal.SIGINT):  # there is nothing to be ended in order
        signal.signal(number, signal.SIG_DFL)
    begun = said = time.monotonic()
    delay = _FIRST_DELAY_SECONDS
    log.info(f"waiting up to {patience:.0f} s for a driver at {driver}")
    while time.monotonic() - begun < patience:
        time.sleep(delay * random.uniform(0.5, 1.0))
        try:
            socket.create_connection(split_address(driver), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() - said > _LINE_SECONDS:
                said = time.monotonic()
                log.info(f"no driver at {driver} yet ({error})")
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
        else:
            return True
    log.error(f"nobody came back within {patience:.0f} s")
    return False


def _begin_anew() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
