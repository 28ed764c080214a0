"""A policy that never answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.gateway_world import GatewayWorld, RawSimulator, TinyPolicy, steps_of

from juggler.gateway.gateway_worker import policy_in
from juggler.runtime.actors.attachment import Attachment, Contact
from juggler.runtime.actors.hub import Hub, HubSettings, Mailbox, WorkerLeft


class Loops(TinyPolicy):
    """Never comes out of its forward pass until it is told to."""

    over = threading.Event()

    def forward_exploration(self, batch: Any) -> Any:
        while batch["observations"].any() and not self.over.is_set():
            self.over.wait(60)
        return super().forward_exploration(batch)


@contextmanager
def attached(directory: Path, events: Mailbox[Any]) -> Iterator[Attachment]:
    settings = HubSettings(
        run_id="run", roles=("envrunner",), heartbeat_seconds=0.05, hang_seconds=1.0
    )
    hub = Hub(settings, events)
    (address,) = hub.start([f"unix:{directory}/hub"])
    attachment = Attachment(Contact(address), "envrunner", Mailbox())
    attachment.held_up_by = policy_in
    try:
        yield attachment
    finally:
        attachment.close()
        hub.close()


def test_inference_that_never_returns_is_found_by_the_deadline_of_hangs(tmp_path: Path) -> None:
    Loops.over.clear()
    events: Mailbox[Any] = Mailbox()
    with (
        attached(tmp_path, events) as attachment,
        GatewayWorld(Loops, rows=1) as world,
        RawSimulator(world.address) as simulator,
    ):
        world.ask()
        simulator.greet()
        simulator.step(steps_of(1))  # the first pass of all may take its time
        world._server._busy = attachment.busy
        simulator.send(steps=steps_of(2, ((1.0, 1.0, 1.0),)))
        deadline = time.monotonic() + 30
        left: list[WorkerLeft] = []
        while not left and time.monotonic() < deadline:
            left += [event for event in events.gather(0.1) if isinstance(event, WorkerLeft)]
        Loops.over.set()
        assert simulator.hear().actions.seq == 2
    assert left[0].reason.startswith("hung in inference by Loops: no progress for")
    assert "forward_exploration" in left[0].stack


def test_a_gateway_that_waits_for_simulators_is_not_busy() -> None:
    busy = threading.Event()

    @contextmanager
    def work() -> Iterator[None]:
        busy.set()
        yield
        busy.clear()

    with GatewayWorld(busy=work) as world:
        world.ask()
        with world.connect() as session:
            session.step([0.0, 0.0, 0.0])
            world.changes.wait_for(lambda: not busy.is_set())
            assert busy.wait(30), "and now and then it is"
