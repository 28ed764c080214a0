"""Makes a forkserver and its children ignore stop signals when imported.

The forkserver starts with these signals blocked. So does a child until it has its own handlers.
"""

import signal

from juggler.runtime.actors.stop_signals import ignore_stop_signals

ignore_stop_signals(inherited=True)
# The parent process may have ignored SIGCHLD, or blocked any signal.
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
