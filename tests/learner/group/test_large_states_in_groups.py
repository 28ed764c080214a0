"""Groups whose state takes longer to save, hash or restore than an operation of theirs may."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from functools import partial
from threading import Event, get_ident
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.groups import at_once, meet

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.group import state_sync, torch_peers
from juggler.learner.group.peers import PeerLost
from juggler.learner.group.state_sync import take_over_newest
from juggler.learner.learner import Learner
from juggler.runtime.modules.models import ActorCritic

SPACES = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)


def learner_of(updates: int) -> Learner:
    make = partial(ActorCritic, *SPACES, {"hidden_sizes": [8]})
    learner = Learner(Impala(make, ImpalaConfig()), seed=updates)
    learner.updates = updates
    return learner


class Large:
    """A state of 32 MB. Like this, its arrays are no copies; a learner's are."""

    def __init__(self, updates: int) -> None:
        self.updates, self.tree = updates, {"x": np.full(1 << 25, updates, np.uint8)}

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.tree, {"updates": self.updates}

    def restore(self, tree: Any, extras: Mapping[str, Any]) -> None:
        self.tree, self.updates = {"x": tree["x"].copy()}, extras["updates"]


def test_a_state_is_sent_a_chunk_at_a_time() -> None:
    """A replay may be most of the memory: whoever sends it makes no second copy, and whoever takes
    it over has what it is told beside what it keeps of it."""
    group = [Large(5), Large(0)]
    tracemalloc.start()
    at_once([partial(take_over_newest, *each) for each in zip(group, meet(2), strict=True)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert group[1].updates == 5
    np.testing.assert_array_equal(group[1].tree["x"], group[0].tree["x"])
    assert peak < 2.5 * (1 << 25)


def test_an_error_of_one_of_them_is_not_hidden_and_keeps_nobody_waiting() -> None:
    first, second = meet(2)

    def fails() -> None:
        raise ValueError("not the state of this learner")

    def first_of_them() -> str:
        with pytest.raises(ValueError, match="not the state") as error:
            first.wait_for_all(fails)
        return str(error.value)

    found = at_once([first_of_them, lambda: second.wait_for_all(lambda: "done")])
    assert found == ["not the state of this learner", "done"]


def test_who_hears_nothing_of_another_one_has_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group = meet(2)
    monkeypatch.setattr(torch_peers, "COLLECTIVE_SECONDS", 0.5)
    with pytest.raises(PeerLost):
        group[1].wait_for_all(lambda: None)


def test_who_waits_for_another_one_makes_progress_and_who_is_waited_for_does_not() -> None:
    first, second = meet(2)
    waits, hung = Event(), Event()
    in_thread: list[int] = []

    def second_progresses() -> None:
        in_thread.append(get_ident())
        waits.set()

    first.progresses, second.progresses = hung.set, second_progresses

    def works() -> bool:
        assert waits.wait(30), "the other one would be taken for hung, too"
        return hung.is_set()

    def second_of_them() -> bool:
        second.wait_for_all(lambda: None)
        return in_thread == [get_ident()] * len(in_thread)

    found = at_once([lambda: first.wait_for_all(works), second_of_them])
    assert found == [False, True]


def test_a_state_of_many_chunks_is_sent_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    group, peers = [learner_of(5), learner_of(0)], meet(2)
    chunks, came = len(list(state_sync._chunks(group[0])[1])), [0, 0]

    def note(rank: int) -> None:
        came[rank] += 1

    for rank, each in enumerate(peers):
        monkeypatch.setattr(each, "progresses", partial(note, rank))
        monkeypatch.setattr(each, "wait_for_all", lambda work: work())
    at_once([partial(take_over_newest, *pair) for pair in zip(group, peers, strict=True)])
    assert came == [chunks, chunks]
