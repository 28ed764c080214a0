"""The driver's books, transition by transition."""

from __future__ import annotations

import pytest

from juggler.driver.core.events import WorkerKey
from juggler.driver.core.ledger import Ledger, LedgerError, OpenBatch

RUNNER = WorkerKey("envrunner-0", "a")
LEARNER = WorkerKey("learner-0", "b")


def requested(ledger: Ledger, batch_id: int, steps: int = 10) -> OpenBatch:
    batch = OpenBatch(batch_id, RUNNER, LEARNER, steps)
    ledger.request(batch)
    return batch


def updating(ledger: Ledger, batch_id: int, live_steps: int) -> OpenBatch:
    batch = requested(ledger, batch_id)
    ledger.hold(batch, live_steps)
    ledger.use(batch)
    return batch


def test_steps_too_old_for_any_batch_are_sampled_and_dropped() -> None:
    ledger = Ledger()
    ledger.hold(requested(ledger, 1), live_steps=7)
    ledger.drop_unbatched(5)
    assert (ledger.sampled, ledger.in_flight, ledger.dropped["stale"]) == (12, 7, 5)
    ledger.check()


def test_steps_in_flight_at_a_checkpoint_are_dropped_as_restart_by_the_run_that_goes_on() -> None:
    before = Ledger()
    before.train(updating(before, 1, live_steps=5))
    updating(before, 2, live_steps=6)
    before.lose(requested(before, 3, steps=10))
    after = Ledger.restore(before.counters())
    assert (after.sampled, after.trained, after.dropped["restart"]) == (11, 5, 6)
    assert (after.in_flight, after.lost_unreported) == (0, 10)
    after.check()


def test_check_notices_a_step_in_no_place() -> None:
    ledger = Ledger()
    ledger.hold(requested(ledger, 1), live_steps=7)
    del ledger.held[1]
    with pytest.raises(LedgerError):
        ledger.check()
