"""What of a replay is saved, and how it goes on from that, or refuses to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.replays import drawn, make, numbered

from juggler.learner.data.replay.replay import Replay
from juggler.learner.data.replay.table import Table
from juggler.runtime.wire.trees import flatten

CPU = torch.device("cpu")


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_the_next_hundred_draws_are_the_same_after_a_restore(alpha: float) -> None:
    def step(replay: Replay, first: int) -> list[int]:
        numbers = []
        for each in replay.add(numbered(first, 7)):
            found = each["number"]
            numbers += found.tolist()
            replay.update_priorities(found.double() % 5 + 0.1)
        return numbers

    changes: Mapping[str, Any] = {"capacity": 30, "priority_exponent": alpha, "begin": 9}
    one, other = make(**changes, seed=3), make(**changes, seed=4)
    for first in range(0, 70, 7):
        step(one, first)
    other.restore(one.state(), CPU)
    for first in range(70, 140, 7):
        assert step(one, first) == step(other, first)


def test_a_table_that_is_not_saved_begins_anew_and_one_that_is_stays() -> None:
    for saved in (True, False):
        replay = make(saved=saved, ratio=1.0)
        list(replay.add(numbered(0, 40)))
        replay.clear()
        assert ("modules" in replay.state()) is saved
        numbers = drawn(replay.add(numbered(100, 4)))
        assert saved or all(number >= 100 for number in numbers)


def test_a_resumed_run_draws_what_the_one_that_went_on_draws_if_tables_are_not_saved() -> None:
    """The processes of a run that is resumed have other seeds, and its learner joins a group."""
    one, other = make(saved=False, seed=3), make(saved=False, seed=4)
    seen = []
    for first in range(0, 300, 100):
        seen.append(drawn(one.add(numbered(0, 40))))
        state = one.state()
        one.clear()
        other.restore(state, CPU)
        other.clear()
        other.draw_apart(0)
        rows = numbered(first, 30)
        assert drawn(one.add(rows)) == drawn(other.add(rows)) != []
    assert len(set(map(tuple, seen))) == 3, "each time other rows"


def test_a_checkpoint_from_before_the_first_row_says_what_is_drawn_without_a_saved_table() -> None:
    one, other = make(saved=False, seed=3), make(saved=False, seed=4)
    other.restore(one.state(), CPU)
    one.clear()
    assert drawn(one.add(numbered(0, 40))) == drawn(other.add(numbered(0, 40)))


def test_a_saved_table_that_is_larger_than_this_one_is_refused() -> None:
    replay = make(capacity=50)
    list(replay.add(numbered(0, 50)))
    with pytest.raises(ValueError, match="replay_memory as they were, or save_replay = false"):
        make(capacity=20).restore(replay.state(), CPU)


@pytest.mark.parametrize("rows", [7, 40])
def test_a_restore_copies_rows_once_and_does_not_ask_for_memory_that_they_had(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A learner has the state of its checkpoint beside the table that it restores."""
    one, other = make(capacity=40, seed=3), make(capacity=40, seed=4)
    list(one.add(numbered(0, rows)))
    state = one.state()
    monkeypatch.setattr("juggler.learner.data.replay.memory.usable_memory", lambda: 10)
    monkeypatch.setattr("juggler.learner.data.replay.table._BYTES_AT_ONCE", 50)
    other.restore(state, CPU)
    columns = flatten(state["modules"]["default"]["table"]["columns"])
    held = [weakref.ref(column) for _, column in columns]
    assert held
    del columns, state
    assert not any(column() is not None for column in held), "the table holds none of them"
    assert drawn(one.add(numbered(50, 5))) == drawn(other.add(numbered(50, 5)))


def test_the_rows_from_before_are_gone_before_others_take_memory(
    monkeypatch: pytest.MonkeyPatch, without_garbage: None
) -> None:
    one, other = make(), make()
    for each in (one, other):
        list(each.add(numbered(0, 40)))
    held = column_of(other)
    restore, gone = Table.restore, list[bool]()

    def restoring(table: Table, state: Mapping[str, Any], device: torch.device) -> None:
        gone.append(held() is None)
        restore(table, state, device)

    monkeypatch.setattr(Table, "restore", restoring)
    other.restore(one.state(), CPU)
    assert gone == [True]


@pytest.mark.parametrize("remover", ["fifo", "random"])
def test_whoever_lets_go_of_a_replay_has_its_memory_back(
    remover: Any, without_garbage: None
) -> None:
    replay = make(remover=remover, saved=False)
    list(replay.add(numbered(0, 40)))
    held = column_of(replay)
    replay.clear()
    assert held() is None
    list(replay.add(numbered(0, 40)))
    held = column_of(replay)
    del replay
    assert held() is None


@pytest.fixture
def without_garbage() -> Iterator[None]:
    """Nothing is let go of because Python has looked for garbage."""
    gc.disable()
    yield
    gc.enable()


def column_of(replay: Replay) -> Callable[[], Any]:
    columns = replay.table._columns
    assert columns is not None
    return weakref.ref(next(iter(columns.tree.values())))


def without(tree: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A tree without one of its leaves."""
    first, *rest = path
    others = {key: value for key, value in tree.items() if key != first}
    return {**others, first: without(tree[first], rest)} if rest else others


def test_a_replay_stays_as_it_is_when_it_refuses_a_state() -> None:
    one, same, larger = (
        make(capacity=rows, priority_exponent=0.6, seed=rows) for rows in (20, 20, 50)
    )
    for replay in (one, same, larger):
        list(replay.add(numbered(0, 50)))
    good = make(capacity=20, priority_exponent=0.6)
    list(good.add(numbered(0, 15)))
    leaves = {"/".join(path): path for path, _ in flatten(good.state())}
    table, selection = "modules/default/table", "modules/default/selection"
    # Older versions do not say these, and the columns say themselves what there is.
    may_be_missing = {"seed", "beginnings", "modules/default/stale_priorities"}
    may_be_missing |= {f"{table}/columns/number", f"{table}/columns/half"}
    assert may_be_missing < leaves.keys() > {f"{table}/free", f"{selection}/times", "generator"}
    longer = good.state()
    longer["modules"]["default"]["selection"]["times"] = np.zeros(16, np.uint8)
    damaged = [without(good.state(), leaves[name]) for name in leaves.keys() - may_be_missing]
    for state in (larger.state(), longer, *damaged):
        with pytest.raises(ValueError, match="the checkpoint"):
            one.restore(state, CPU)
    assert drawn(one.add(numbered(50, 9))) == drawn(same.add(numbered(50, 9))) != []
    one.restore(good.state(), CPU)
    assert one.metrics()["replay_rows"] == 15.0


def test_a_checkpoint_from_before_the_first_row_is_one_to_go_on_from() -> None:
    replay, other = make(), make()
    list(replay.add(numbered(0, 0)))
    other.restore(replay.state(), CPU)
    assert len(drawn(other.add(numbered(0, 8)))) == 16


def test_a_damaged_state_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no replay table"):
        make().restore({"format": np.array(3), "modules": {}}, CPU)


def test_a_state_of_another_format_is_refused_with_what_to_do() -> None:
    replay = make()
    list(replay.add(numbered(0, 8)))
    for told in ({"format": np.array(4)}, {}):
        state = {**replay.state(), **told}
        if not told:
            del state["format"]
        found = 4 if told else 1
        with pytest.raises(ValueError, match=f"is of format {found}.*save_replay = false"):
            make().restore(state, CPU)
