"""Ties the forkserver, and all that it forks, to the driver.

The forkserver imports this module for its effect, and then imports what workers share.

multiprocessing itself uses a pipe whose other end the driver holds. But every worker inherits that
end too. So a forkserver with workers would outlive a killed driver, and so would the workers, which
die with the forkserver. The pipe does end a forkserver whose driver is gone before this import,
because there are no workers then.

Attributes:
    failure: why something could not be imported: every worker raises it as it starts, since a
        forkserver that ended of it could not report it. A package that is not there is none: a
        worker that needs it says so itself.
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
    die_with_parent,
    kill_children,
    set_title,
    take_in_orphans,
)

#: Process id of the forkserver, also in everything that it forks.
PID = os.getpid()


# Imports make many objects and little garbage: looking for it took a tenth of their time. It is
# looked for again after the last of them.
gc.disable()


def _end(*_: object) -> None:
    kill_children(PID)
    os._exit(1)


signal.signal(END_SIGNAL, _end)
die_with_parent(END_SIGNAL)
take_in_orphans()
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

# Garbage is not looked for among what was imported: each worker would look through all of it.
gc.freeze()
gc.enable()
