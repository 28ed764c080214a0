"""Ties the forkserver, and everything that it forks, to the driver.

The forkserver imports this module for its effect, and then the modules that workers share.

multiprocessing itself uses a pipe whose other end the driver holds. But every worker inherits that
end too. So a forkserver with workers would outlive a killed driver, and so would the workers, which
die with the forkserver. The pipe does end a forkserver whose driver is gone before this import,
because there are no workers then.

Attributes:
    failure: why an import failed: every worker raises it as it starts, since the forkserver could
        not report it. A missing package does not count: a worker that needs it reports it itself.
"""

import gc
import importlib
import os
import signal
import warnings
from contextlib import suppress

from juggler.runtime.actors.processes import (
    END_SIGNAL,
    PRELOAD,
    adopt_orphans,
    die_with_parent,
    kill_children,
    set_title,
)

#: Process id of the forkserver, also in all its children.
PID = os.getpid()


# Imports make many objects and little garbage: collecting it took 10 % of their time. The
# collector is enabled again after the last import.
gc.disable()


def _end(*_: object) -> None:
    kill_children(PID)
    os._exit(1)


signal.signal(END_SIGNAL, _end)
die_with_parent(END_SIGNAL)
adopt_orphans()
# multiprocessing does not know the orphans that the forkserver adopts.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
set_title("forkserver")

failure: Exception | None = None
try:
    for name in PRELOAD:
        with suppress(ImportError):
            importlib.import_module(name)
except Exception as error:
    failure = error

# The collector ignores imported objects: otherwise each worker would scan all of them.
gc.freeze()
gc.enable()
