"""Minibatches: who gets what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from juggler.learner.algorithms.ppo.minibatches import deal, row_keys
from juggler.learner.core.hashing import mixed

KEY = torch.tensor(7)


def some(rows: int, steps: int, dead: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of rows, and which steps are there."""
    rng = np.random.default_rng(rows * 100 + steps)
    return torch.arange(rows) + 11, torch.as_tensor(rng.random((rows, steps)) > dead)


@pytest.mark.parametrize(("rows", "steps", "count"), [(8, 32, 4), (5, 7, 3), (6, 1, 4), (1, 5, 8)])
def test_every_step_that_is_there_is_in_exactly_one_minibatch(
    rows: int, steps: int, count: int
) -> None:
    keys, present = some(rows, steps)
    places, there = deal(KEY, keys, present, count)
    assert places.shape == there.shape == (count, rows * -(-steps // count))
    dealt = places[there].sort().values
    assert dealt.tolist() == present.flatten().nonzero().squeeze(1).tolist()


def test_every_minibatch_gets_as_many_steps_of_each_row_as_the_others() -> None:
    keys, present = some(40, 30)
    places, there = deal(KEY, keys, present, 4)
    shares = torch.stack(
        [
            torch.bincount(part[is_there] // 30, minlength=40)
            for part, is_there in zip(places, there, strict=True)
        ]
    )  # [4, 40]
    assert (shares.max(0).values - shares.min(0).values).max() <= 1
    totals = shares.sum(1).float()
    assert totals.max() / totals.min() < 1.1, "what does not divide evenly goes to different ones"


def test_another_key_is_another_deal_and_the_same_key_the_same() -> None:
    keys, present = some(8, 32)
    first, _ = deal(KEY, keys, present, 4)
    assert torch.equal(first, deal(KEY, keys, present, 4)[0])
    assert not torch.equal(first, deal(KEY + 1, keys, present, 4)[0])


def test_steps_are_dealt_out_at_random() -> None:
    """Each with the same chance to each minibatch, whatever was before it."""
    keys, present = some(64, 32, dead=0.0)
    where = torch.zeros(200, 64 * 32, dtype=torch.long)
    for number in range(200):
        places, _ = deal(mixed(torch.tensor(number)), keys, present, 4)
        for minibatch, part in enumerate(places):
            where[number, part] = minibatch
    shares = torch.stack([(where == minibatch).float().mean(0) for minibatch in range(4)])  # [4, M]
    assert (shares - 0.25).abs().max() < 5 * (0.25 * 0.75 / 200) ** 0.5
    together = (where[:, 1:] == where[:, :-1]).float().mean()
    # Two of the 32 steps of a row are in one minibatch of 8 with a chance of 7 in 31.
    assert together == pytest.approx(7 / 31, abs=0.01)


def test_a_part_of_a_sample_is_dealt_out_as_in_the_whole() -> None:
    """Learners that have a share of the rows each make the same minibatches together as one that
    has all of them, though its rows may be filled up to greater length."""
    logp, (_, live) = torch.randn(6, 9), some(6, 9)
    live[:3, 7:] = False
    places, there = deal(KEY, row_keys(logp, live), live, 4)
    whole = [set(part[is_there].tolist()) for part, is_there in zip(places, there, strict=True)]
    parts: list[set[int]] = [set() for _ in range(4)]
    for first, last, steps in ((0, 3, 7), (3, 6, 9)):
        part_live = live[first:last, :steps]
        keys = row_keys(logp[first:last, :steps], part_live)
        for minibatch, (part, is_there) in enumerate(
            zip(*deal(KEY, keys, part_live, 4), strict=True)
        ):
            parts[minibatch] |= {
                (first + int(place) // steps) * 9 + int(place) % steps for place in part[is_there]
            }
    assert parts == whole


def test_rows_that_hold_the_same_in_their_live_steps_have_the_same_key() -> None:
    logp = torch.randn(3, 5)
    live = torch.ones(3, 5, dtype=torch.bool)
    live[:, 3] = False
    keys = row_keys(logp, live)
    assert len(set(keys.tolist())) == 3
    logp[:, 3] = 77.0
    assert torch.equal(row_keys(logp, live), keys)
    logp[0, 2] += 0.1
    assert row_keys(logp, live)[0] != keys[0]


def test_mixed_numbers_stay_within_32_bits_and_are_all_different() -> None:
    numbers = mixed(torch.arange(100_000))
    assert numbers.min() >= 0
    assert numbers.max() < 2**32
    assert len(numbers.unique()) == 100_000
    bits = (numbers.unsqueeze(1) >> torch.arange(32)) & 1
    assert (bits.float().mean(0) - 0.5).abs().max() < 0.01
    assert mixed(torch.tensor(2**32 - 1)) < 2**32
