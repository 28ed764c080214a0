"""The circular buffer uses each of the newest N samples K times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from juggler.learner.core.learner_core import Columns
from juggler.learner.data.sources import CircularBuffer


def sample(number: int) -> Columns:
    return {"number": number}


def numbers(samples: Sequence[Columns]) -> list[int]:
    return [each["number"] for each in samples]


@pytest.mark.parametrize(
    ("batches", "uses"), [(1, 1), (4, 2), (8, 2), (5, 3), (3, 3), (2, 5), (1, 3)]
)
def test_each_sample_is_used_k_times_while_it_is_one_of_the_newest_n(
    batches: int, uses: int
) -> None:
    buffer = CircularBuffer(batches, uses)
    ages: dict[int, list[int]] = {}
    for number in range(50):
        for due in numbers(buffer.add(sample(number))):
            ages.setdefault(due, []).append(number - due)
    done = {number: each for number, each in ages.items() if number <= 50 - batches}
    assert len(done) == 51 - batches
    for each in done.values():
        assert each == [use * batches // uses for use in range(uses)]
        assert max(each) < batches


def test_what_is_forgotten_is_not_used_again() -> None:
    buffer = CircularBuffer(4, 2)
    uses = Counter(number for each in range(3) for number in numbers(buffer.add(sample(each))))
    buffer.clear()
    for each in range(10, 20):
        uses.update(numbers(buffer.add(sample(each))))
    assert [uses[number] for number in range(3)] == [2, 1, 1]
    assert uses[10] == 2
