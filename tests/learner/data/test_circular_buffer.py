"""The circular buffer: each sample is used K times while it is one of the newest N."""

from __future__ import annotations

from collections import Counter

import pytest

from juggler.learner.config import AppoConfig, ImpalaConfig
from juggler.learner.core.learner_core import Sample
from juggler.learner.data.circular_buffer import CircularBuffer


def sample(number: int) -> Sample:
    return {"default": {"number": number}}


def numbers(samples: list[Sample]) -> list[int]:
    return [each["default"]["number"] for each in samples]


@pytest.mark.parametrize(
    ("batches", "uses"), [(1, 1), (4, 2), (8, 2), (5, 3), (3, 3), (2, 5), (1, 3)]
)
def test_each_sample_is_used_k_times_while_it_is_one_of_the_newest_n(
    batches: int, uses: int
) -> None:
    buffer = CircularBuffer(batches, uses)
    ages: dict[int, list[int]] = {}
    for number in range(50):
        for due in numbers(buffer.push(sample(number))):
            ages.setdefault(due, []).append(number - due)
    done = {number: each for number, each in ages.items() if number <= 50 - batches}
    assert len(done) == 51 - batches
    for each in done.values():
        assert each == [use * batches // uses for use in range(uses)]
        assert max(each) < batches


def test_as_many_samples_are_due_with_every_push_once_it_is_full() -> None:
    buffer = CircularBuffer(8, 2)
    due = [numbers(buffer.push(sample(number))) for number in range(20)]
    assert due[3] == [3]
    assert all(each == [number - 4, number] for number, each in list(enumerate(due))[8:])


def test_what_is_forgotten_is_not_used_again() -> None:
    buffer = CircularBuffer(4, 2)
    uses = Counter(number for each in range(3) for number in numbers(buffer.push(sample(each))))
    buffer.clear()
    for each in range(10, 20):
        uses.update(numbers(buffer.push(sample(each))))
    assert [uses[number] for number in range(3)] == [2, 1, 1]
    assert uses[10] == 2


def test_it_is_as_the_algorithms_config_has_it() -> None:
    twice = CircularBuffer.of(AppoConfig(buffer_batches=2, batch_uses=2))
    twice.push(sample(0))
    assert numbers(twice.push(sample(1))) == [0, 1]
    once = CircularBuffer.of(ImpalaConfig())
    assert numbers(once.push(sample(0))) == [0]
    assert numbers(once.push(sample(1))) == [1]
