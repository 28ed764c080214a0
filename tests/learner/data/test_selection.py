"""Which rows are drawn and which leave, against the same rules written out row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.replays import table_of

from juggler.learner.algorithms.imitation.discriminator import Ranked
from juggler.learner.data.collate import collate
from juggler.learner.data.replay.episode_rows import rows_of_episodes
from juggler.learner.data.replay.replay import MixInReplay, Replay
from juggler.learner.data.replay.rules import Rules
from juggler.learner.data.replay.slot_trees import LeastTree
from juggler.learner.data.replay.table import Drawn, Table
from juggler.learner.data.sources import Queue
from juggler.runtime.wire.structures import tree_map

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def memory_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of tables would each ask the kernel, which takes 10 ms for it when it is busy."""
    monkeypatch.setattr("juggler.learner.data.replay.memory.usable_memory", lambda: None)


def numbered(first: int, count: int) -> dict[str, Any]:
    return {"number": torch.arange(first, first + count), "pair": torch.ones(count, 2)}


def kept(table: Table) -> list[int]:
    """The numbers of the rows in a table, the oldest first."""
    numbers: list[int] = table.rows(table.oldest_first())["number"].tolist()
    return numbers


def taken(table: Table, count: int) -> list[int]:
    """The numbers of rows that are drawn."""
    numbers: list[int] = table.sample(count).rows["number"].tolist()
    return numbers


@pytest.mark.parametrize("capacity", [1, 2, 3, 15, 16, 17, 300])
def test_the_least_keys_are_found_as_by_sorting_all(capacity: int) -> None:
    rng, tree, keys = (
        np.random.default_rng(capacity),
        LeastTree(capacity),
        np.full(capacity, np.inf),
    )
    for _ in range(100):
        slots = np.unique(rng.integers(capacity, size=rng.integers(1, 9)))
        keys[slots] = np.where(rng.random(len(slots)) < 0.2, np.inf, rng.permutation(len(slots)))
        keys[slots] += rng.random(len(slots))
        tree[slots] = keys[slots]
        for count in (0, 1, 3, capacity, capacity + 5):
            expected = [each for each in np.argsort(keys)[:count] if np.isfinite(keys[each])]
            assert tree.least(count).tolist() == expected


@dataclass
class Model:
    """Rows one by one: their numbers in the order in which they came, and how often each was drawn.

    Attributes:
        came, drawn, unused: how many rows came, were drawn, and left without.
    """

    capacity: int
    rules: Rules
    times: dict[int, int] = field(default_factory=dict)
    came: int = 0
    drawn: int = 0
    unused: int = 0

    def put(self, count: int, here: set[int]) -> None:
        """So many rows come, and the table has these by now."""
        stay = list(self.times)
        excess = max(0, len(stay) + min(count, self.capacity) - self.capacity)
        self.unused += max(0, count - self.capacity)  # there is no room for these
        left = {"fifo": stay[:excess], "lifo": stay[len(stay) - excess :]}.get(self.rules.remover)
        if left is None:  # any of them
            left = [number for number in stay if number not in here]
            assert len(left) == excess
        for number in left:
            self.unused += self.times.pop(number) == 0
        new = range(self.came + count - min(count, self.capacity), self.came + count)
        self.times |= dict.fromkeys(new, 0)
        self.came += count

    def draw(self, numbers: list[int]) -> None:
        """These rows were drawn, in this order."""
        for number in numbers:
            stay = list(self.times)
            if self.rules.selector != "random":
                assert number == stay[0 if self.rules.selector == "fifo" else -1]
            self.drawn += self.times[number] == 0
            self.times[number] += 1
            if self.times[number] == self.rules.max_times_sampled:
                del self.times[number]


@pytest.mark.parametrize("capacity", [1, 7, 16])
@pytest.mark.parametrize("remover", ["fifo", "lifo", "random"])
@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(priority_exponent=0.7),
        Rules(max_times_sampled=3),
        Rules(max_times_sampled=2, priority_exponent=0.7),
        Rules("fifo", max_times_sampled=1),
        Rules("fifo", max_times_sampled=3),
        Rules("lifo", max_times_sampled=2),
    ],
    ids=str,
)
def test_rows_are_drawn_and_leave_as_one_by_one(rules: Rules, remover: Any, capacity: int) -> None:
    rules = rules._replace(remover=remover)
    table = table_of(capacity, **rules._asdict())
    model, rng = Model(capacity, rules), np.random.default_rng(1)
    asked = 0
    for _ in range(100):
        count = int(rng.integers(0, 6 if rng.random() < 0.9 else 30))
        if count:
            table.insert(numbered(model.came, count))
            model.put(count, set(kept(table)))
            asked += count
        if table.size:
            assert kept(table) == list(model.times)
            count = int(min(table.may_draw(), rng.integers(0, 9)))
            if rules.max_times_sampled:
                left = sum(rules.max_times_sampled - times for times in model.times.values())
                assert table.may_draw() == left
            if count:
                model.draw(taken(table, count))
        assert table.size == len(model.times)
        assert (table.drawn_rows, table.unused_rows) == (model.drawn, model.unused)
        waiting = sum(times == 0 for times in model.times.values())
        assert table.came_rows == asked == model.drawn + model.unused + waiting


def test_draws_that_are_limited_follow_the_chances_of_one_draw_after_the_other() -> None:
    """Of rows with weights 1, 2 and 5, each drawn at most once, two are drawn in any order."""
    weights = {0: 1.0, 1: 2.0, 2: 5.0}
    expected = {
        (a, b): weights[a] / 8 * weights[b] / (8 - weights[a])
        for a in weights
        for b in weights
        if a != b
    }
    counts: Counter[tuple[int, ...]] = Counter()
    rng, trials = np.random.default_rng(0), 2000
    for _ in range(trials):
        table = Table(3, Rules(max_times_sampled=1, priority_exponent=1.0), rng)
        table.insert(numbered(0, 3))
        assert table._weights is not None
        table._weights[np.arange(3)] = np.array(list(weights.values()))
        counts[tuple(taken(table, 2))] += 1
    assert set(counts) == set(expected)
    chi2 = sum((counts[pair] - trials * p) ** 2 / (trials * p) for pair, p in expected.items())
    assert chi2 < 5 + 5 * np.sqrt(10)


def test_rows_of_the_lowest_priority_leave_first() -> None:
    table = table_of(6, remover="lowest_priority", priority_exponent=0.5)
    table.insert(numbered(0, 6))
    drawn = table.sample(1000)
    numbers = drawn.rows["number"].numpy()
    table.update_priorities(drawn, np.array([3.0, 0.5, 9.0, 0.1, 4.0, 2.0])[numbers])
    table.insert(numbered(6, 2))
    assert kept(table) == [0, 2, 4, 5, 6, 7]
    table.insert(numbered(8, 1))
    assert kept(table) == [0, 2, 4, 6, 7, 8], "new rows have the largest priority, 9"


def test_a_row_of_priority_0_is_drawn_again_and_rows_of_priority_0_alone_are_drawn_alike() -> None:
    table = table_of(4, priority_exponent=0.5)
    table.insert(numbered(0, 4))
    every = Drawn({}, np.arange(4), table.generations[np.arange(4)])
    table.update_priorities(every, np.array([0.0, 1.0, 4.0, -3.0]))
    drawn = table.sample(100_000)
    shares = np.array([1e-3, 1.0, 2.0, 1e-3]) / 3.002  # the least priority is 1e-6
    np.testing.assert_allclose(drawn.shares, shares[drawn.slots])
    counts, expected = np.bincount(drawn.slots, minlength=4), 100_000 * shares
    assert float(((counts - expected) ** 2 / expected).sum()) < 3 + 5 * np.sqrt(6)
    table.update_priorities(every, np.zeros(4))
    assert set(table.sample(100).slots.tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(table.sample(100).shares, 0.25)


def test_any_row_leaves_equally_often_where_they_leave_at_random() -> None:
    rng, counts = np.random.default_rng(0), np.zeros(8)
    for _ in range(2000):
        table = Table(8, Rules(remover="random"), rng)
        table.insert(numbered(0, 8))
        table.insert(numbered(8, 3))
        here = kept(table)
        assert here[-3:] == [8, 9, 10]
        counts += [number not in here for number in range(8)]
    assert float(((counts - 750) ** 2 / 750).sum()) < 7 + 5 * np.sqrt(14)


@pytest.mark.parametrize(
    "rules",
    [
        {"selector": "fifo", "max_times_sampled": 2},
        {"selector": "lifo", "max_times_sampled": 1, "remover": "lifo"},
        {"max_times_sampled": 2, "remover": "random"},
        {"max_times_sampled": 3, "priority_exponent": 0.6, "remover": "lowest_priority"},
    ],
    ids=str,
)
def test_the_next_draws_are_the_same_after_a_restore_by_any_rules(rules: dict[str, Any]) -> None:
    def step(replay: Replay, first: int) -> list[int]:
        numbers = []
        for each in replay.add(numbered(first, 7)):
            found = each["number"]
            numbers += found.tolist()
            replay.update_priorities(found.double() % 5 + 0.1)
        return numbers

    one, other = (
        Replay(dict, capacity=20, size=3, ratio=1.0, seed=seed, **rules) for seed in (3, 4)
    )
    for first in range(0, 70, 7):
        step(one, first)
    other.restore(one.state(), CPU)
    for first in range(70, 350, 7):
        assert step(one, first) == step(other, first)
        assert one.metrics() == other.metrics()


def test_rows_that_were_drawn_too_often_for_a_new_limit_are_gone_after_a_restore() -> None:
    one = Replay(dict, capacity=20, size=3, ratio=2.0, max_times_sampled=3)
    other = Replay(dict, capacity=20, size=3, ratio=1.0, max_times_sampled=1, selector="fifo")
    list(one.add(numbered(0, 20)))
    state = one.state()
    other.restore(state, CPU)
    table = other.table
    fresh = int((one.table.times == 0).sum())
    assert 0 < table.size == fresh < 20
    numbers = [
        number for sample in other.add(numbered(20, 18)) for number in sample["number"].tolist()
    ]
    assert numbers == sorted(set(numbers))


def test_a_row_that_was_drawn_256_times_counts_as_drawn_after_a_restore_without_a_limit() -> None:
    one = Replay(dict, capacity=8, size=256, ratio=256.0, max_times_sampled=300, selector="fifo")
    assert len(list(one.add(numbered(0, 1)))) == 1
    other = Replay(dict, capacity=8, size=1, ratio=1.0)
    other.restore(one.state(), CPU)
    assert other.books()["replay_rows_waiting"] == 0
    list(other.add(numbered(1, 6)))
    times = other.table.times[:7]
    assert times[0] == 1
    assert other.books()["replay_rows_waiting"] == np.count_nonzero(times == 0)


@pytest.mark.parametrize("remover", ["fifo", "random"])
def test_rows_that_left_by_a_limit_leave_no_gaps_to_be_drawn_after_a_restore_without(
    remover: Any,
) -> None:
    one = Replay(dict, capacity=20, size=3, ratio=0.5, max_times_sampled=1)
    list(one.add(numbered(0, 20)))
    there = kept(one.table)
    other = Replay(dict, capacity=20, size=60, ratio=1.0, remover=remover)
    other.restore(one.state(), CPU)
    drawn = other.table.sample(600).rows["number"].tolist()
    counts = Counter(drawn)
    assert len(there) < 20
    assert sorted(counts) == there
    assert min(counts.values()) > 600 / len(there) / 3, "all are drawn alike"
    for first in range(20, 40):
        oldest = kept(other.table)
        list(other.add(numbered(first, 1)))
        if remover == "fifo":
            assert kept(other.table) == [*oldest, first][-20:]


@pytest.mark.parametrize("capacity", [4, 5, 7, 8, 20])
def test_the_oldest_rows_leave_a_table_that_has_got_more_room(capacity: int) -> None:
    one = Replay(dict, capacity=4, size=1, ratio=0.1)
    for first in range(7):
        list(one.add(numbered(first, 1)))
    for _ in range(2):  # a checkpoint of one that has got more room is like others
        other = Replay(dict, capacity=capacity, size=1, ratio=0.1)
        other.restore(one.state(), CPU)
        table = other.table
        for first in range(int(table.generations.max()), 30):
            oldest = kept(table)
            list(other.add(numbered(first, 1)))
            assert kept(table) == [*oldest, first][-capacity:]
        one = other


def test_draws_that_no_row_is_left_for_are_not_made_up_for() -> None:
    replay = Replay(dict, capacity=100, size=2, ratio=3.0, max_times_sampled=1)
    for first in range(0, 40, 4):
        assert len(list(replay.add(numbered(first, 4)))) == 2
    assert replay.metrics()["samples_per_insert"] == 1.0


def test_what_the_table_gives_oldest_first_and_once_is_what_a_queue_gives(make_batch: Any) -> None:
    replay = Replay(
        rows_of_episodes,
        episodes=True,
        capacity=1000,
        size=5,
        ratio=1.0,
        selector="fifo",
        max_times_sampled=1,
    )
    steps = 0
    for seed in range(20):
        batches = [make_batch(3, 9, seed=seed, ends=0.3), make_batch(2, 9, seed=100 + seed)]
        columns = collate(batches)
        (sample,) = replay.add(columns)
        found = dict(sample)
        assert found.pop("importance_weights").tolist() == [1.0] * 5
        assert found.pop("new_steps") == columns["live"].sum()
        steps += int(columns["live"].sum())
        assert found.keys() == columns.keys()
        tree_map(
            lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True),
            columns,
            found,
        )
    told = replay.metrics()
    assert (told["replay_rows"], told["replay_rows_waiting"], told["replay_rows_unused"]) == (
        0,
    ) * 3
    assert told["replay_rows_drawn"] == 5 * 20


def test_a_replay_whose_rows_may_run_out_says_so_whatever_is_around_it() -> None:
    def replay(most: int) -> Replay:
        return Replay(dict, capacity=9, size=2, ratio=1.0, max_times_sampled=most)

    why = replay(1).why_alone()
    assert why.startswith("max_times_sampled = 1 with several learners: they would run out")
    assert Ranked(replay(1)).why_alone() == why
    assert MixInReplay(replay(1), share=0.5, capacity=9).why_alone() == why
    assert Ranked(replay(0)).why_alone() == Queue().why_alone() == ""


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"selector": "lifo"}, "replay_selector = 'lifo' draws the same step again and again"),
        ({"remover": "lowest_priority"}, "set priority_exponent above 0"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Replay(dict, capacity=9, size=2, ratio=1.0, **rules)
