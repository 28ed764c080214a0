"""The page about the life of a batch lists every end that the driver's books know."""

from __future__ import annotations

import inspect
from typing import get_args

from support.place import REPOSITORY

from juggler.driver.core import events
from juggler.driver.core.ledger import Ledger

PAGE = (REPOSITORY / "docs" / "life-of-a-batch.md").read_text()
ENDS = PAGE.partition("## Every end")[2]

#: What books no end: a batch begins, or goes on; or the books are looked at.
NO_ENDS = {"request", "use", "in_flight", "counters", "check"}
#: What happens to workers and groups, and to no batch.
OF_NO_BATCH = {
    "RunnerJoined",
    "RunnerPlays",
    "LearnerJoined",
    "BeginWithFewer",
    "PeersMet",
    "MeetAgain",
    "Proceed",
    "StopRequested",
}


def test_every_method_of_the_ledger_that_ends_a_batch_or_takes_an_end_back_is_there() -> None:
    methods = {name for name in vars(Ledger) if not name.startswith("_")}
    assert methods >= NO_ENDS
    assert {name for name in methods - NO_ENDS if f"`Ledger.{name}`" not in ENDS} == set()


def test_every_event_of_a_batch_is_there() -> None:
    told = {each.__name__ for each in get_args(events.Event)}
    assert told >= OF_NO_BATCH
    assert {name for name in told - OF_NO_BATCH if f"`{name}`" not in ENDS} == set()


def test_every_reason_for_a_drop_is_there() -> None:
    assert {reason for reason in events.DROP_REASONS if f"dropped: `{reason}`" not in ENDS} == set()


def test_no_method_is_named_that_the_ledger_lacks() -> None:
    named = {part.partition("`")[0] for part in PAGE.split("`Ledger.")[1:]}
    assert named <= set(dict(inspect.getmembers(Ledger)))
