"""A forkserver imports this for its effect: stop signals end neither it nor what it forks.

It starts with these signals blocked, as everything does that it forks before it has a handler.
"""

import signal

from juggler.runtime.actors.stop_signals import ignore_stop_signals

ignore_stop_signals(inherited=True)
# A parent may have ignored the end of its children, or blocked any signal.
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
