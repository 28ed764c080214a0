"""The forkserver imports this early, for its effect: the forkserver ends with the driver, and
everything that it forked, and that those processes started, ends with it.

multiprocessing itself uses a pipe whose other end the driver holds. But every worker inherits that
end too. So a forkserver with workers would outlive a killed driver, and so would the workers, which
die with the forkserver. The pipe does end a forkserver whose driver is gone before this import,
because there are no workers then.
"""

import gc
import os
import signal
import warnings

from juggler.runtime.actors.orphans import die_with_parent, kill_children, take_in_orphans
from juggler.runtime.actors.processes import END_SIGNAL, set_title

#: Process id of the forkserver, also in everything that it forks.
PID = os.getpid()


# Imports make many objects and little garbage: looking for it took a tenth of their time. It is
# looked for again after the last of them: see `preloaded`.
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
