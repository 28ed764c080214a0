"""Receiver processes that cannot listen."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
from support.sharing import soon

from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.supervisor import Exited, RestartPolicy
from juggler.runtime.streams import receivers as receivers_module
from juggler.runtime.streams.permits import Permits
from juggler.runtime.streams.receivers import ReceiverProgram, Receivers


def test_receivers_that_keep_ending_are_told_and_fail_the_learner(
    monkeypatch: pytest.MonkeyPatch, every_thread_ends: None
) -> None:
    monkeypatch.setattr(
        receivers_module, "_POLICY", RestartPolicy(first_delay=0.01, most_in_window=2)
    )
    receivers = Receivers("127.0.0.1:0")
    told: list[str] = []
    failures: list[Exception] = []
    # Nobody could be admitted: without a token, they do not listen for others.
    program = ReceiverProgram(
        receivers.address.replace("127.0.0.1", "0.0.0.0"),
        "unix:/none",
        "run",
        "",
        Permits.new().key,
        1,
    )
    try:
        with pytest.raises(EndpointError, match=r"no receiver listens at .* refusing to listen on"):
            receivers.start([program], told.append, failures.append)
        soon(lambda: failures, "that is an error")
    finally:
        receivers.close()
    assert "; ".join(told).count(": it starts again in") == 1
    assert told[-1].endswith("which keeps ending: 0 receivers are left")
    assert str(failures[0]).startswith("no receiver is left: exit code 1")


def test_receivers_do_not_share_the_port_of_others(every_thread_ends: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(EndpointError, match=f"cannot listen on {address}"):
            Receivers(address)


class _EndsOnceMore(Mailbox[Exited]):
    """While the news of an end is told, its reader is closed, and the wake-up comes too early."""

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__()
        self._close = close
        self.put(Exited("receiver-0", 1, "exit code 1", 0.1))

    def gather(self, timeout: float = 0.0) -> list[Exited]:
        if not timeout:
            self._close()
            self.wake()
        return super().gather(timeout)


def test_receivers_that_are_closed_as_one_ends_do_not_wait_for_the_next_end(
    every_thread_ends: None,
) -> None:
    receivers = Receivers("127.0.0.1:0")
    try:
        receivers._events = _EndsOnceMore(receivers._over.set)
        watch = threading.Thread(target=receivers._watch, args=(1, print, print), daemon=True)
        watch.start()
        watch.join(10.0)
        assert not watch.is_alive()
    finally:
        receivers.close()
