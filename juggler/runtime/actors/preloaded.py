"""The forkserver imports this last, for its effect: it imports what workers share, and garbage is
looked for again, but not among what was imported. Otherwise, each worker would look through all of
that as it starts.

Attributes:
    failure: why something could not be imported: every worker raises it as it starts, since a
        forkserver that ended of it could tell nobody. A package that is not there is none: a worker
        that needs it says so itself.
"""

import gc
import importlib
from contextlib import suppress

from juggler.runtime.actors.processes import PRELOAD

failure: Exception | None = None
try:
    for name in PRELOAD:
        with suppress(ImportError):
            importlib.import_module(name)
except Exception as error:
    failure = error

gc.freeze()
gc.enable()
