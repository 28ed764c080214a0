"""The forkserver imports this last, for its effect: garbage is looked for again, but not among what
was imported. Otherwise, each worker would look through all of that as it starts.
"""

import gc

gc.freeze()
gc.enable()
