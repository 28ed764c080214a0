"""Replay: what is kept, drawn and saved."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import drawn, in_format_4, make, numbered, table_of
from torch import Tensor

from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS, Replay
from juggler.learner.data.sources import NEW_STEPS
from juggler.runtime.wire.trees import flatten

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("column", "told"),
    [
        # One entry would be broadcast to all four rows.
        (torch.zeros(1, 2), "one entry for each row in every"),
        (torch.zeros(()), r"tensors \[n, \.\.\.\], and not a"),
        (np.zeros(4), "and not a ndarray as 'tree/other'"),
    ],
)
def test_what_is_not_a_column_of_rows_is_refused_before_anything_is_kept(
    column: Any, told: str
) -> None:
    replay, sample = make(), {"number": torch.zeros(4), "tree": {"other": column}}
    with pytest.raises(ValueError, match=told):
        replay.expect(sample)
    with pytest.raises(ValueError, match=told):
        list(replay.add(sample))
    assert drawn(replay.add(numbered(0, 4)))


@pytest.mark.parametrize(
    ("number", "told"),
    [
        ({"capacity": 0}, "capacity = 0 of a replay: must be"),
        ({"size": 0}, "size = 0 of a replay: must be at least 1"),
        ({"ratio": 0.0}, "ratio = 0.0 of a replay: must be"),
        ({"ratio": -1.0}, "ratio = -1.0 of a replay: must be"),
        ({"ratio": float("inf")}, "ratio = inf of a replay: must be"),
        ({"ratio": float("nan")}, "ratio = nan of a replay: must be"),
    ],
)
def test_a_replay_that_could_never_draw_or_never_stop_is_refused(
    number: dict[str, float], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        make(**number)


def test_rows_unlike_the_first_ones_are_refused() -> None:
    table = table_of(4)
    table.insert({"x": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="do not fit those in the replay table"):
        table.insert({"x": torch.zeros(2, 4)})


def test_a_table_beyond_the_memory_of_the_host_says_what_would_fit() -> None:
    with pytest.raises(ValueError, match=r"replay_capacity = 10{9}:"):
        list(make(capacity=10**9).add({"x": torch.zeros(1, 100)}))


def test_a_limited_memory_holds_fewer_rows_also_after_a_restore() -> None:
    replay = make(memory=16e-9 * 30)  # a row has 16 bytes
    list(replay.add(numbered(0, 50)))
    table = replay.table
    assert (table.capacity, table.size) == (30, 30)
    other = make(memory=16e-9 * 30)
    other.restore(replay.state(), CPU)
    assert other.table.capacity == 30
    lower = make(memory=16e-9 * 30, capacity=20)
    with pytest.raises(ValueError, match="has 30 rows, and cannot continue in one of 20"):
        lower.restore(replay.state(), CPU)
    for room, rows in ((45, 45), (1000, 100)):  # more memory than before makes more room
        more = make(memory=16e-9 * room)
        more.restore(replay.state(), CPU)
        list(more.add(numbered(50, 200)))
        assert more.table.size == rows
    with pytest.raises(ValueError, match="cannot continue in one of 20: set"):
        make(memory=16e-9 * 20).restore(replay.state(), CPU)
    unlimited = make(memory=1.0)
    list(unlimited.add(numbered(0, 50)))
    assert unlimited.table.capacity == 100


def test_a_memory_in_which_learning_never_begins_is_told() -> None:
    words = (
        r"replay_memory = 4.8e-07: 30 steps of 16 bytes have room, and .* replay_begin = 40; set"
    )
    with pytest.raises(ValueError, match=words):
        list(make(memory=16e-9 * 30, begin=40).add(numbered(0, 50)))


def test_rows_that_fit_on_disk_alone_are_kept_there(tmp_path: Path) -> None:
    wide = {"number": torch.zeros(4, 10**5)}
    with pytest.raises(ValueError, match=r"replay_directory = .*there is no room for"):
        list(make(capacity=10**7, directory=str(tmp_path)).add(wide))
    with pytest.raises(ValueError, match="No such file or directory"):
        list(make(directory=str(tmp_path / "nowhere")).add(numbered(0, 4)))
    assert list(tmp_path.iterdir()) == []


def test_rows_on_disk_that_no_checkpoint_could_hold_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("juggler.learner.data.replay.column_storage.usable_memory", lambda: 10_000)
    wide = {"number": torch.zeros(4, 100)}  # 400 bytes each
    keys: dict[str, Any] = {"capacity": 30, "directory": str(tmp_path)}
    with pytest.raises(ValueError, match=r"two copies .* save_replay = false"):
        make(**keys).expect(wide)
    assert len(list(make(**keys, saved=False).add(wide))) == 2


def test_rows_that_have_no_room_on_a_device_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {"number": torch.zeros(4, 100, device="meta")}  # 400 bytes each
    assert make(capacity=10**12).expect(rows) == 0, "torch does not say how much is free there"
    monkeypatch.setattr(
        "juggler.learner.data.replay.column_storage.memory_of", lambda device: 10_000
    )
    assert make(capacity=25).expect(rows) == 0, "none of it is memory of the host"
    told = r"replay_capacity = 26: .* and 0.0 GB of the memory of meta are free. Set it to 22 or"
    with pytest.raises(ValueError, match=told):
        make(capacity=26).expect(rows)


@pytest.mark.long
def test_memory_beyond_the_limit_of_a_cgroup_is_not_counted_on(tmp_path: Path) -> None:
    """The limit of this process's own cgroup, if it can make one."""
    group = Path("/sys/fs/cgroup/memory") / f"juggler-{os.getpid()}"
    limit = group / "memory.limit_in_bytes"
    if not group.parent.is_dir() or not os.access(group.parent, os.X_OK):
        pytest.skip("there are no cgroups of version 1")
    try:
        group.mkdir()
        limit.write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    script = (
        "import os, pathlib, sys, torch\n"
        "pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "from juggler import Replay\n"
        "replay = Replay(dict, capacity=2_000_000, size=4, ratio=1.0)\n"
        "replay.expect({'x': torch.zeros(1, 256)})\n"
    )
    try:
        command = [sys.executable, "-c", script, str(group)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert re.search(r"take 2\.0 GB, and (1\.[01]|0\.[5-9]) GB of this host", ended.stderr)
    finally:
        group.rmdir()


@pytest.mark.parametrize("ratio", [0.25, 1.0, 3.7])
def test_rows_are_drawn_at_the_ratio_whatever_the_size_of_what_arrives(ratio: float) -> None:
    replay, rng, arrived, taken = make(ratio=ratio), np.random.default_rng(0), 0, 0
    for _ in range(200):
        count = int(rng.integers(0, 20))
        taken += len(drawn(replay.add(numbered(arrived, count))))
        arrived += count
        assert -1e-6 < ratio * arrived - taken < 4 + 1e-6, "less than a sample is owed"


def test_learners_of_a_group_draw_as_often_as_one_another() -> None:
    """With 3 and 9 rows, both make the steps of 12 rows."""
    arrived = {3: torch.tensor([12.0, 12.0, 2.0, 2.0]), 9: torch.tensor([12.0, 12.0, 2.0, 2.0])}
    counts = []
    for own, total in arrived.items():

        def sums(_: Tensor, total: Tensor = total) -> Tensor:
            return total

        samples = list(make(ratio=2.0).add(numbered(0, own), sums))
        counts.append(len(samples))
        assert [int(each[NEW_STEPS]) for each in samples] == [12, 0, 0]
    assert counts == [3, 3], "2 learners x 3 steps x 4 rows are 12 rows twice"


def test_no_learner_of_a_group_draws_before_all_of_them_have_rows() -> None:
    """Otherwise it would wait for others in a step of its own."""
    replay = make(ratio=2.0)
    assert not drawn(replay.add(numbered(0, 8), lambda _: torch.tensor([8.0, 8.0, 2.0, 1.0])))
    later = replay.add(numbered(8, 2), lambda _: torch.tensor([4.0, 4.0, 2.0, 2.0]))
    assert len(drawn(later)) == 4, "2 learners x 4 rows are 4 rows twice; nothing is made up for"


def test_a_replay_that_is_tried_out_draws_once_for_each_arrival_from_what_it_has() -> None:
    replay = make(size=8, ratio=0.25, begin=1000)
    replay.try_out()
    sizes = [len(each["number"]) for each in replay.add(numbered(0, 3))]
    assert sizes == [8]
    sizes = [len(each["number"]) for each in replay.add(numbered(3, 1))]
    assert sizes == [8]
    assert list(make(size=8, ratio=0.25, begin=1000).add(numbered(0, 3))) == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "gave no priorities"),
        (float("nan"), "gave the priority nan"),
        (float("inf"), "gave the priority inf"),
        (-0.5, "gave the priority -0.5"),
    ],
)
def test_a_loss_without_priorities_is_told_where_a_replay_is_tried_out(
    given: float | None, found: str
) -> None:
    told = f"priority_exponent = 0.6, and the loss {found}: return juggler.Loss"
    priorities = torch.tensor([1.0, 0.0, 1.0, 1.0])
    wrong = None
    if given is not None:
        wrong = priorities.clone()
        wrong[2] = given
    for alpha in (0.6, 0.0):
        replay = make(size=4, begin=1000, priority_exponent=alpha)
        replay.try_out()
        next(replay.add(numbered(0, 4)))
        replay.update_priorities(priorities)
        next(replay.add(numbered(4, 4)))
        if alpha:
            with pytest.raises(ValueError, match=re.escape(told)):
                replay.update_priorities(wrong)
        else:
            replay.update_priorities(wrong)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_rows_are_drawn_by_priority_and_weights_make_up_for_it(alpha: float) -> None:
    replay = make(capacity=4, size=1000, ratio=1e5, priority_exponent=alpha, importance_exponent=1)
    priorities = torch.tensor([1.0, 2.0, 4.0, 8.0])
    shares = (priorities**alpha / (priorities**alpha).sum()).numpy()
    counts = np.zeros(4)
    for steps, each in enumerate(replay.add(numbered(0, 4))):
        numbers = each["number"]
        if steps > 5:  # from then on every row has been drawn
            counts += np.bincount(numbers, minlength=4)
            weights = each[IMPORTANCE_WEIGHTS]
            expected = shares.min() / shares[numbers.numpy()]
            np.testing.assert_allclose(weights, expected, rtol=1e-5)
        replay.update_priorities(priorities[numbers])
    expected = counts.sum() * shares
    assert float(((counts - expected) ** 2 / expected).sum()) < 3 + 5 * np.sqrt(6)


@pytest.mark.parametrize("beta", [0.0, 0.4, 0.7, 1.0])
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_importance_weights_are_divided_by_the_largest_of_their_sample(
    alpha: float, beta: float
) -> None:
    replay = make(size=2, ratio=20.0, priority_exponent=alpha, importance_exponent=beta)
    given = np.array([0.5, 1.0, 2.0, 4.0, 8.0])
    priorities, others = np.ones(5), 0  # of new rows; samples without the unlikeliest row
    for each in replay.add(numbered(0, 5)):
        numbers = each["number"].numpy()
        shares = priorities**alpha / (priorities**alpha).sum()
        weights = (5 * shares) ** -beta
        expected = weights[numbers] / weights[numbers].max()
        np.testing.assert_allclose(each[IMPORTANCE_WEIGHTS], expected, rtol=1e-6)
        others += weights[numbers].max() < weights.max()
        priorities[numbers] = given[numbers]
        replay.update_priorities(torch.from_numpy(given[numbers]))
    assert others > 5 or not beta


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_a_new_row_has_the_largest_priority_that_was_given(alpha: float) -> None:
    replay = make(capacity=8, size=4, ratio=1.0, priority_exponent=alpha)
    for each in replay.add(numbered(0, 4)):
        replay.update_priorities(torch.full_like(each["number"], 5.0).double())
    list(replay.add(numbered(4, 1)))
    kept: Any = replay.state()["modules"]
    assert kept["default"]["weights"][4] == pytest.approx(5.0**alpha)


def test_a_priority_for_a_row_that_was_written_over_is_ignored_and_counted() -> None:
    replay = make(capacity=4, size=4, ratio=1.0, priority_exponent=1.0)
    (sample,) = replay.add(numbered(0, 4))
    given = torch.full((4,), 100.0)
    later = replay.add(numbered(4, 4))
    replay.table.insert(dict(numbered(4, 4)))
    replay.update_priorities(given)
    assert replay.metrics()["stale_priorities"] == 4
    assert replay.table._weights.total == 4.0
    resumed = make(capacity=4, size=4, ratio=1.0, priority_exponent=1.0)
    resumed.restore(replay.state(), CPU)
    assert resumed.metrics()["stale_priorities"] == 4
    del sample, later


def test_a_priority_that_is_no_number_changes_nothing() -> None:
    replay = make(priority_exponent=1.0)
    for _ in replay.add(numbered(0, 4)):
        replay.update_priorities(torch.full((4,), torch.nan))
    assert replay.table._weights.total == 4.0


# What of a replay is saved, and how it goes on from that, or refuses to.


@pytest.mark.parametrize("saved", [dict, in_format_4])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_the_next_hundred_draws_are_the_same_after_a_restore(
    alpha: float, saved: Callable[[Any], Any]
) -> None:
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
    other.restore(saved(one.state()), CPU)
    for first in range(70, 140, 7):
        assert step(one, first) == step(other, first)
        assert one.metrics() == other.metrics()


def test_a_resumed_run_draws_what_the_one_that_went_on_draws_if_tables_are_not_saved() -> None:
    """A resumed run's processes have new seeds; its learner joins a group."""
    one, other = make(saved=False, seed=3), make(saved=False, seed=4)
    seen = []
    for first in range(0, 300, 100):
        if first:  # once, a checkpoint is from before the first row
            seen.append(drawn(one.add(numbered(0, 40))))
        state = one.state()
        one.clear()
        other.restore(state, CPU)
        other.clear()
        other.draw_apart(0)
        rows = numbered(first, 30)
        assert drawn(one.add(rows)) == drawn(other.add(rows)) != []
    assert len(set(map(tuple, seen))) == len(seen) == 2, "each time other rows"


@pytest.mark.parametrize("rows", [7, 40])
def test_a_restore_copies_rows_once_and_does_not_ask_for_memory_that_they_had(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A learner holds its checkpoint beside the restored table."""
    one, other = make(capacity=40, seed=3), make(capacity=40, seed=4)
    list(one.add(numbered(0, rows)))
    state = one.state()
    monkeypatch.setattr("juggler.learner.data.replay.column_storage.usable_memory", lambda: 10)
    monkeypatch.setattr("juggler.learner.data.replay.table._BYTES_AT_ONCE", 50)
    other.restore(state, CPU)
    columns = flatten(state["modules"]["default"]["columns"])
    held = [weakref.ref(column) for _, column in columns]
    assert held
    del columns, state
    assert not any(column() is not None for column in held), "the table holds none of them"
    assert drawn(one.add(numbered(50, 5))) == drawn(other.add(numbered(50, 5)))


def test_a_replay_that_is_cleared_or_deleted_gives_its_memory_back(without_garbage: None) -> None:
    replay = make(saved=False)
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
    """Python's garbage collector frees nothing of it."""
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
    own = "modules/default"
    # Older versions do not say these, and the columns say themselves what there is.
    may_be_missing = {"seed", "beginnings"}
    may_be_missing |= {f"{own}/columns/number", f"{own}/columns/half"}
    assert may_be_missing < leaves.keys() > {f"{own}/counts", f"{own}/drawn", "generator"}
    damaged = [without(good.state(), leaves[name]) for name in leaves.keys() - may_be_missing]
    for state in (larger.state(), *damaged):
        with pytest.raises(ValueError, match="the checkpoint"):
            one.restore(state, CPU)
    assert drawn(one.add(numbered(50, 9))) == drawn(same.add(numbered(50, 9))) != []
    one.restore(good.state(), CPU)
    assert one.metrics()["replay_rows"] == 15.0


def test_a_state_of_another_format_is_refused_with_what_to_do() -> None:
    replay = make()
    list(replay.add(numbered(0, 8)))
    for told in ({"format": np.array(3)}, {}):
        state = {**replay.state(), **told}
        if not told:
            del state["format"]
        found = 3 if told else 1
        with pytest.raises(ValueError, match=f"is of format {found}.*save_replay = false"):
            make().restore(state, CPU)


def test_rows_of_format_4_that_are_in_no_order_of_a_ring_are_refused() -> None:
    replay = make(capacity=20)
    list(replay.add(numbered(0, 50)))
    state = in_format_4(replay.state())
    generations = state["modules"]["default"]["table"]["generations"]
    generations[:2] = generations[1::-1].copy()
    with pytest.raises(ValueError, match=r"not in the order of arrival.*save_replay = false"):
        make(capacity=20).restore(state, CPU)
