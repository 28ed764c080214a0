"""Metrics of updates on their way to the driver: what is averaged, and what ends a run."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from support.cores import make_core, samples_of
from torch import Tensor

from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.learner import Learner
from juggler.learner.process.overlap import PendingMetrics
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]


def of_update(**numbers: float) -> dict[str, Tensor]:
    return {name: torch.tensor(x) for name, x in {"skipped": 0.0, **numbers}.items()}  # [] each


def test_means_are_of_all_updates_since_the_last_ones() -> None:
    metrics = PendingMetrics("default")
    for update, values in enumerate([(1.0, 5.0, 6.0), (10.0, 30.0)]):
        for value in values:
            metrics.add(of_update(loss=value))
        assert metrics.take(update) == {"loss": [4.0, 20.0][update], "skipped": 0.0}
        assert metrics.take(update) == {}


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
def test_a_mean_is_of_the_updates_that_have_the_metric(order: list[int]) -> None:
    updates = [
        of_update(value_loss=1.0),
        of_update(value_loss=3.0, policy_loss=7.0),
        of_update(value_loss=5.0, policy_loss=8.0),
    ]
    metrics = PendingMetrics("default")
    for place in order:
        metrics.add(updates[place])
    assert metrics.take(3) == {"value_loss": 3.0, "policy_loss": 7.5, "skipped": 0.0}


def test_a_core_need_not_say_whether_it_skips_steps() -> None:
    metrics = PendingMetrics("default")
    for update in range(1, 7):
        metrics.add({"loss": torch.tensor(float(update))})  # []
        assert metrics.take(update) == {"loss": float(update)}


def test_a_core_may_have_no_metrics_at_all() -> None:
    metrics = PendingMetrics("default")
    for update in range(1, 7):
        metrics.add({})
        assert metrics.take(update) == {}
    metrics.add({"loss": torch.tensor(2.0)})  # []
    assert metrics.take(7) == {"loss": 2.0}
    assert fetch_metrics({}) == {}, "an update was made"
    assert fetch_metrics({}) == {}


def test_large_numbers_arrive_exactly() -> None:
    rows = torch.tensor(2.0**24 + 1, dtype=torch.float64)  # [] more than 32 bits can say
    metrics = PendingMetrics("default")
    for _ in range(2):
        metrics.add({**of_update(), "replay_rows": rows})
    assert metrics.take(2)["replay_rows"] == 2.0**24 + 1


def test_td3_tells_of_its_policy_though_not_every_update_moves_it(make_batch: MakeBatch) -> None:
    learner = Learner(make_core("td3", replay_batch_size=32, replay_ratio=1.0), seed=1)
    found = [learner.step(sample) for sample in samples_of(make_batch, 8)]
    updates = [numbers for numbers in found if numbers]
    moves = ["policy_loss" in numbers for numbers in updates]
    assert moves == [False, True, False, True, False, True], "a step of the optimizer in each"
    for count in (2, 3):
        metrics = PendingMetrics("default")
        for numbers in updates[:count]:
            metrics.add(numbers)
        assert metrics.take(count)["policy_loss"] == updates[1]["policy_loss"]


@pytest.mark.parametrize("share", [0.0, 1 / 32, 31 / 32])
def test_updates_in_which_some_step_is_finite_do_not_end_a_run(share: float) -> None:
    metrics = PendingMetrics("default")
    for update in range(1, 20):
        metrics.add(of_update(skipped=1.0 if update % 5 else share))
        metrics.take(update)
        assert metrics.hopeless == ""


def test_five_updates_in_a_row_without_a_finite_step_end_a_run() -> None:
    metrics = PendingMetrics("default")
    for update, share in enumerate([1.0, 0.5, 1.0, 1.0, 1.0, 1.0], start=1):
        metrics.add(of_update(skipped=share))
        assert metrics.take(update) == {"skipped": share}
        assert metrics.hopeless == ""
    metrics.add(of_update(skipped=1.0))
    metrics.take(7)
    assert re.search("in any step of 5 updates in a row.* update 7", metrics.hopeless)
