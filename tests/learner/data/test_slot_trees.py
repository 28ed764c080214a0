"""The tree of sums against running sums written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from juggler.learner.data.replay.slot_trees import LeastTree, SumTree


def slow_find(weights: np.ndarray, value: float) -> int:
    """The slot in which a running sum lies, one slot at a time."""
    for slot, weight in enumerate(weights):
        if value < weight:
            return slot
        value -= weight
    raise AssertionError("beyond the total")


@pytest.mark.parametrize("capacity", [1, 2, 3, 15, 16, 17, 255, 256, 257])
def test_slots_are_found_as_by_adding_up_all_weights(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    tree, weights = SumTree(capacity), np.zeros(capacity)
    for _ in range(200):
        slots = rng.integers(capacity, size=rng.integers(1, 6))
        if rng.random() < 0.3:  # a run of successive ones, as a ring has it
            slots = (slots[0] + np.arange(min(capacity, 40))) % capacity
        slots = np.array(list(dict.fromkeys(slots.tolist())))
        # Sums of such weights are exact, so that both ways find the same.
        new = rng.integers(0, 8, size=len(slots)) / 4
        tree[slots], weights[slots] = new, new
        assert tree.total == weights.sum()
        np.testing.assert_array_equal(tree[np.arange(capacity)], weights)
        if tree.total:
            sums = np.append(rng.random(20), [0.0, np.nextafter(1.0, 0.0)]) * tree.total
            found = tree.find(sums)
            assert found.tolist() == [slow_find(weights, float(each)) for each in sums]


def test_draws_follow_the_weights_and_never_take_a_weight_of_0() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random(100) ** 2
    weights[rng.integers(100, size=20)] = 0.0
    tree = SumTree(100)
    tree[np.arange(100)] = weights
    draws = 1_000_000
    counts = np.bincount(tree.find(rng.random(draws) * tree.total), minlength=100)
    assert not counts[weights == 0].any()
    expected = draws * weights[weights > 0] / weights.sum()
    chi2 = float(((counts[weights > 0] - expected) ** 2 / expected).sum())
    freedom = int((weights > 0).sum()) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom), "about normal, five deviations"


def test_rounding_does_not_add_up_over_many_changes() -> None:
    rng = np.random.default_rng(1)
    tree, weights = SumTree(1000), np.zeros(1000)
    for _ in range(2000):
        slots = np.unique(rng.integers(1000, size=64))
        new = rng.random(len(slots)) * 10.0 ** rng.integers(-8, 9)
        tree[slots], weights[slots] = new, new
    assert tree.total == pytest.approx(weights.sum(), rel=1e-12)


def test_a_slot_that_is_named_twice_has_the_last_weight() -> None:
    tree = SumTree(4)
    tree[np.array([2, 2])] = np.array([5.0, 3.0])
    assert tree.total == 3.0


class Counting(np.ndarray[Any, Any]):
    """Numbers of a tree that count how many of them are read or written; what was read is plain."""

    touched = 0

    def take(self, *args: Any, **kwargs: Any) -> Any:
        return self._read(super().take(*args, **kwargs))

    def __getitem__(self, key: Any) -> Any:
        return self._read(super().__getitem__(key))

    def __setitem__(self, key: Any, numbers: Any) -> None:
        Counting.touched += self.view(np.ndarray)[key].size
        super().__setitem__(key, numbers)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        Counting.touched += sum(x.size for x in inputs if isinstance(x, Counting))
        plain = [x.view(np.ndarray) if isinstance(x, Counting) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        Counting.touched += sum(x.size for x in args if isinstance(x, Counting))
        plain = [x.view(np.ndarray) if isinstance(x, Counting) else x for x in args]
        return func(*plain, **kwargs)

    def _read(self, found: Any) -> Any:
        Counting.touched += np.size(found)
        return np.asarray(found)


@pytest.mark.parametrize("kind", [SumTree, LeastTree])
def test_a_hundred_times_as_many_slots_take_less_than_twice_the_work(
    kind: type[SumTree | LeastTree],
) -> None:
    """Counted in numbers that are read and written. 10^4 slots have four levels, 10^6 have five:
    the logarithm to the base of 16, rounded up."""
    touched = []
    for capacity in (10**4, 10**6):
        rng, tree = np.random.default_rng(0), kind(capacity)
        tree[np.arange(capacity)] = rng.random(capacity)
        tree._levels = [level.view(Counting) for level in tree._levels]
        Counting.touched = 0
        for _ in range(20):
            tree[np.unique(rng.integers(capacity, size=32))] = rng.random()
            if isinstance(tree, SumTree):
                tree.find(rng.random(32) * tree.total)
            else:
                tree.least(32)
        touched.append(Counting.touched)
    assert touched[0] > 20 * 32 * 16, "they are counted"
    assert touched[1] < 2 * touched[0]
