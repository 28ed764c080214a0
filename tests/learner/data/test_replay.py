"""Replay: what is kept, how often it is drawn, and what is saved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.replays import drawn, make, numbered, table_of
from torch import Tensor

from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS
from juggler.learner.data.sources import NEW_STEPS

CPU = torch.device("cpu")


def test_the_newest_rows_are_kept_each_once() -> None:
    table = table_of(10)
    for first in range(0, 23, 3):
        table.insert(dict(numbered(first, 3)))
    kept = sorted(table.rows(np.arange(table.size))["number"].tolist())
    assert kept == list(range(14, 24))
    assert sorted(table.generations.tolist()) == list(range(15, 25))


def test_of_more_rows_than_fit_the_last_ones_are_kept() -> None:
    table = table_of(4)
    slots = table.insert(dict(numbered(0, 11)))
    assert len(set(slots.tolist())) == 4
    assert sorted(table.rows(slots)["number"].tolist()) == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("column", "told"),
    [
        # One entry would be broadcast to all four rows.
        (
            torch.zeros(1, 2),
            "one entry for each row in every column: it gave 4 of 'number', 1 of 'tree/other'",
        ),
        (torch.zeros(()), r"tensors \[n, \.\.\.\], and not a tensor \[\] as 'tree/other'"),
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
        ({"capacity": 0}, "capacity = 0 of a replay: must be at least 1"),
        ({"size": 0}, "size = 0 of a replay: must be at least 1"),
        ({"ratio": 0.0}, "ratio = 0.0 of a replay: must be above 0 and finite"),
        ({"ratio": -1.0}, "ratio = -1.0 of a replay: must be above 0 and finite"),
        ({"ratio": float("inf")}, "ratio = inf of a replay: must be above 0 and finite"),
        ({"ratio": float("nan")}, "ratio = nan of a replay: must be above 0 and finite"),
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
    with pytest.raises(
        ValueError,
        match=r"replay_capacity = 10{9}: so many kept steps, of 400 bytes each, take 400.0 GB",
    ):
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
    with pytest.raises(ValueError, match="has 30 rows, and cannot go on in one of 20"):
        lower.restore(replay.state(), CPU)
    for room, kept in ((45, 45), (1000, 100)):  # more memory than before makes more room
        more = make(memory=16e-9 * room)
        more.restore(replay.state(), CPU)
        list(more.add(numbered(50, 200)))
        assert more.table.size == kept
    with pytest.raises(ValueError, match="cannot go on in one of 20: set replay_capacity and rep"):
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
    monkeypatch.setattr("juggler.learner.data.replay.memory.usable_memory", lambda: 10_000)
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
    monkeypatch.setattr("juggler.learner.data.replay.memory.memory_of", lambda device: 10_000)
    assert make(capacity=25).expect(rows) == 0, "none of it is memory of the host"
    told = r"replay_capacity = 26: .* and 0.0 GB of the memory of meta are free. Set it to 22 or"
    with pytest.raises(ValueError, match=told):
        make(capacity=26).expect(rows)


@pytest.mark.long
def test_memory_beyond_the_limit_of_a_cgroup_is_not_counted_on(tmp_path: Path) -> None:
    """A limit that holds: of a cgroup of this process's own, where it may make one."""
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
        assert abs(taken - ratio * arrived) < 4 + 1e-6, "less than a sample is owed"


def test_every_row_is_drawn_equally_often() -> None:
    replay = make(capacity=50, size=100, ratio=20_000.0)
    numbers = drawn(replay.add(numbered(0, 50)))
    assert len(numbers) == 1_000_000
    counts = np.bincount(numbers, minlength=50)
    assert float(((counts - 20_000) ** 2 / 20_000).sum()) < 49 + 5 * np.sqrt(2 * 49)


def test_nothing_is_drawn_before_enough_has_arrived_and_nothing_is_made_up_for_later() -> None:
    replay = make(begin=10, size=2, ratio=1.0)
    assert [len(drawn(replay.add(numbered(k, 3)))) for k in range(5)] == [0, 0, 0, 2, 4]


def test_learners_of_a_group_draw_as_often_as_one_another() -> None:
    """One of them got 3 rows and the other 9: both make the steps that 12 rows are worth."""
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
    """Else it would wait for others in a step that they do not make."""
    replay = make(ratio=2.0)
    assert not drawn(replay.add(numbered(0, 8), lambda _: torch.tensor([8.0, 8.0, 2.0, 1.0])))
    later = replay.add(numbered(8, 2), lambda _: torch.tensor([4.0, 4.0, 2.0, 2.0]))
    assert len(drawn(later)) == 4, "2 learners x 4 rows are 4 rows twice; nothing is made up for"


@pytest.mark.parametrize("most", [0, 1])
def test_a_replay_that_is_tried_out_draws_once_for_each_arrival_from_what_it_has(most: int) -> None:
    replay = make(size=8, ratio=0.25, begin=1000, max_times_sampled=most)
    replay.try_out()
    sizes = [len(each["number"]) for each in replay.add(numbered(0, 3))]
    assert sizes == [3 if most else 8]
    sizes = [len(each["number"]) for each in replay.add(numbered(3, 1))]
    assert sizes == [1 if most else 8]
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
        if steps > 5:  # by then every row has been drawn
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
    assert kept["default"]["selection"]["weights"][4] == pytest.approx(5.0**alpha)


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


def test_priorities_of_rows_that_left_with_their_last_draw_are_not_counted_as_late() -> None:
    replay = make(capacity=8, size=4, ratio=2.0, priority_exponent=1.0, max_times_sampled=2)
    samples = replay.add(numbered(0, 4))
    next(samples)
    table = replay.table
    last = replay._drawn.generations == 0
    weights: Any = table._weights
    replay.update_priorities(torch.full((4,), 7.0))
    assert replay.metrics()["stale_priorities"] == 0
    given = weights[replay._drawn.slots]
    np.testing.assert_array_equal(given, np.where(last, 0.0, 7.0))
    for _ in samples:
        replay.update_priorities(torch.full((4,), 9.0))
    for first in range(4, 400, 4):
        for _ in replay.add(numbered(first, 4)):
            replay.update_priorities(torch.rand(4) + 0.1)
    assert replay.metrics()["stale_priorities"] == 0, (
        "nobody has replaced a row between draw and priority"
    )
    # Freed slots hold no row, and get no weight by a priority that comes late.
    empty = np.flatnonzero(table.generations == 0)
    assert len(empty) > 0
    assert not weights[empty].any()


def test_a_priority_that_is_no_number_changes_nothing() -> None:
    replay = make(priority_exponent=1.0)
    for _ in replay.add(numbered(0, 4)):
        replay.update_priorities(torch.full((4,), torch.nan))
    assert replay.table._weights.total == 4.0
