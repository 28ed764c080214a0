"""Imported by the forkserver, first of all, for what that does: it dies with the driver.

multiprocessing's own way is a pipe whose other end the driver holds. But every worker inherits
that end too, so that a forkserver with workers would outlive a driver that was killed, and the
workers, which die with the forkserver, would outlive it too.
"""

import os
import signal

from juggler.runtime.actors.processes import die_with_parent, ignore_stop_signals, set_title

die_with_parent()
if os.getppid() == 1:
    os._exit(1)
ignore_stop_signals()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by who started it
set_title("forkserver")
