"""A deadline for the first answer to a call: nothing else ends one that is accepted and left.

grpcio, too, has left calls open whose server was gone. A channel that was closed and made anew
reaches the server that is there now.
"""

from __future__ import annotations

import threading
from threading import Timer

import grpc

#: Longer than gRPC tries to connect (20 s), so that its reason is heard where it has one, and
#: shorter than an EnvRunner waits for its first weights (30 s).
FIRST_ANSWER_SECONDS = 25.0


class FirstAnswer:
    """Closes the channel of a call, which ends it, unless the server answers in time.

    A server of this package sends its initial metadata as soon as it has let in a call.

    Args:
        channel: of the call, which is about to be made.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._over = False
        self._gave_up = False
        self._timer = Timer(FIRST_ANSWER_SECONDS, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def came(self) -> None:
        """The server has answered, or the call has ended."""
        with self._lock:
            self._over = True
        self._timer.cancel()

    @property
    def why_not(self) -> str:
        """For people: no answer came, and the channel is closed; "": it did, or still may."""
        with self._lock:
            if not self._gave_up:
                return ""
        return f"the learner gave no answer for {FIRST_ANSWER_SECONDS:.0f} s"

    def _give_up(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = self._gave_up = True
        self._channel.close()
