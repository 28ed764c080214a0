"""Imported by the forkserver, first of all, for what that does: it ends with the driver, and what
it forked, and whatever those started, ends with it.

multiprocessing's own way is a pipe whose other end the driver holds. But every worker inherits
that end too, so that a forkserver with workers would outlive a driver that was killed, and the
workers, which die with the forkserver, would outlive it too. The pipe does end a forkserver whose
driver was gone before this was imported: there are no workers then.
"""

import os
import signal
import warnings

from juggler.runtime.actors.orphans import die_with_parent, kill_children, take_in_orphans
from juggler.runtime.actors.processes import END_SIGNAL, ignore_stop_signals, set_title

#: Of the forkserver, in all that it forks.
PID = os.getpid()


def _end(*_: object) -> None:
    kill_children(PID)
    os._exit(1)


signal.signal(END_SIGNAL, _end)
die_with_parent(END_SIGNAL)
take_in_orphans()
# Of the orphans that it takes in multiprocessing knows nothing.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
ignore_stop_signals()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by who started it
set_title("forkserver")
