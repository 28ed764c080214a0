"""The driver's books, transition by transition."""

from __future__ import annotations

import pytest

from juggler.driver.core.events import DROP_REASONS, UsedBatch, WorkerKey
from juggler.driver.core.ledger import Batch, Counters, Ledger, LedgerError

RUNNER = WorkerKey("envrunner-0", "a")
LEARNER = WorkerKey("learner-0", "b")


def requested(ledger: Ledger, batch_id: int, steps: int = 10) -> Batch:
    batch = Batch(batch_id, RUNNER, LEARNER, steps)
    ledger.request(batch)
    return batch


def updating(ledger: Ledger, batch_id: int, live_steps: int) -> Batch:
    batch = requested(ledger, batch_id)
    ledger.hold(batch, live_steps)
    ledger.use(batch)
    return batch


def test_a_request_is_not_sampled_yet() -> None:
    ledger = Ledger()
    requested(ledger, 1)
    assert ledger.sampled == 0
    assert ledger.in_flight == 0
    ledger.check()


def test_the_first_report_makes_steps_sampled_and_in_flight() -> None:
    ledger = Ledger()
    ledger.hold(requested(ledger, 1), live_steps=7)
    assert (ledger.sampled, ledger.in_flight) == (7, 7)
    ledger.check()


def test_steps_too_old_for_any_batch_are_sampled_and_dropped() -> None:
    ledger = Ledger()
    ledger.hold(requested(ledger, 1), live_steps=7)
    ledger.pass_over(5)
    assert (ledger.sampled, ledger.in_flight, ledger.dropped["stale"]) == (12, 7, 5)
    ledger.check()


def test_every_batch_of_a_share_is_closed_as_the_answer_says() -> None:
    ledger = Ledger()
    share = [updating(ledger, batch_id, live_steps=batch_id) for batch_id in (1, 2, 4)]
    ledger.settle(share, [UsedBatch(1, 1, 0), UsedBatch(2, 2, 9, dropped="stale")])
    assert ledger.trained == 1
    assert ledger.dropped["stale"] == 2
    assert ledger.dropped["restart"] == 4  # not in the answer
    assert ledger.in_flight == 0
    ledger.check()


def test_an_answer_about_batches_of_no_share_closes_none_of_them() -> None:
    ledger = Ledger()
    ledger.settle([updating(ledger, 1, live_steps=5)], [UsedBatch(1, 5, 0), UsedBatch(9, 5, 0)])
    assert (ledger.trained, ledger.in_flight) == (5, 0)
    ledger.check()


def test_requests_of_a_dead_runner_stand_beside_the_identity() -> None:
    ledger = Ledger()
    ledger.lose(requested(ledger, 1, steps=10))
    assert (ledger.lost_unreported, ledger.sampled) == (10, 0)
    ledger.check()


def test_a_lost_batch_that_had_arrived_after_all_is_sampled_and_not_lost() -> None:
    ledger = Ledger()
    ledger.lose(requested(ledger, 1, steps=10))
    batch = ledger.revive(1)
    assert batch is not None
    ledger.hold(batch, live_steps=8)
    assert (ledger.lost_unreported, ledger.sampled, ledger.in_flight) == (0, 8, 8)
    assert ledger.revive(1) is None
    ledger.check()


def test_only_a_lost_batch_is_revived() -> None:
    ledger = Ledger()
    ledger.train(updating(ledger, 1, live_steps=7))
    ledger.cancel(requested(ledger, 2))
    assert ledger.revive(1) is None
    assert ledger.revive(2) is None


def test_the_end_drops_what_is_reported_and_forgets_what_is_not() -> None:
    ledger = Ledger()
    ledger.hold(requested(ledger, 1), live_steps=3)
    updating(ledger, 2, live_steps=4)
    requested(ledger, 3)
    ledger.finish()
    counters = ledger.counters()
    assert (counters.sampled, counters.dropped["shutdown"], counters.in_flight) == (7, 7, 0)
    assert counters.lost_unreported == 0
    assert not ledger.requested
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


def test_counters_that_do_not_balance_are_refused() -> None:
    with pytest.raises(LedgerError, match=r"11.*5"):
        Ledger.restore(Counters(11, 5, {"stale": 1}, in_flight=4, lost_unreported=0))


def test_check_notices_a_step_in_no_place() -> None:
    ledger = Ledger()
    ledger.hold(requested(ledger, 1), live_steps=7)
    del ledger.held[1]
    with pytest.raises(LedgerError):
        ledger.check()


def test_every_reason_is_in_the_counters_from_the_start() -> None:
    assert tuple(Ledger().counters().dropped) == DROP_REASONS
