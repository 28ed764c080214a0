"""NaN and infinity in what a script has a learner learn from: they reach no replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.learner import Episodes, Learner
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]
VECTOR, TWO = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)


def dqn() -> Learner:
    keys = {"replay_begin": 0, "replay_batch_size": 8, "replay_ratio": 1.0}
    return build_learner({"algorithm": "dqn", **keys}, None, VECTOR, TWO, {"hidden_sizes": [8]})


def with_one(batch: EpisodeBatch, column: str, at: tuple[int, ...], value: float) -> EpisodeBatch:
    array = getattr(batch, column).copy()
    array[at] = value
    return replace(batch, **{column: array})


def columns_of(batch: EpisodeBatch) -> dict[str, Any]:
    return batch.to_tree()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("column", "at", "where"),
    [
        ("rewards", (1, 2), "row 1 at step 2"),
        ("action_logp", (0, 3), "row 0 at step 3"),
        ("observations", (2, 4, 1), "row 2 at step 4"),
        ("last_observations", (1, 0), "row 1 at step 5"),
    ],
)
def test_a_number_that_is_not_finite_is_named_before_a_replay_keeps_it(
    make_batch: MakeBatch, column: str, at: tuple[int, ...], where: str, value: float
) -> None:
    learner = dqn()
    bad = with_one(make_batch(3, 6, ends=0.0), column, at, value)
    with pytest.raises(ValueError, match=f"^{column} in {where} are {value}: only finite"):
        learner.update_from_batch(columns_of(bad))
    with pytest.raises(ValueError, match=f"^{column} in row . of batch 1 at step"):
        learner.update_from_episodes([make_batch(3, 6), bad])
    with pytest.raises(ValueError, match="only finite numbers"):
        learner.update_from_episodes([bad], async_update=True).result(60)
    assert (learner.updates, learner.books_of_samples()) == (0, {})
    for seed in range(3):
        metrics = fetch_metrics(learner.update_from_episodes([make_batch(3, 6, seed=seed)]))
        assert metrics["skipped"] == 0.0
    learner.close()


def test_a_hook_that_mends_episodes_comes_before_anybody_looks_at_them(
    make_batch: MakeBatch,
) -> None:
    class Mends(Learner):
        def preprocess_episodes(self, episodes: Episodes) -> Episodes:
            return [_mended(each) for each in episodes]

    bad = with_one(make_batch(3, 6, ends=0.0), "rewards", (1, 2), np.nan)
    one = Mends(build_learner({"algorithm": "impala"}, None, VECTOR, TWO, {}).core)
    other = Learner(one.core)
    metrics = [fetch_metrics(one.update_from_episodes([bad]))]
    metrics.append(fetch_metrics(other.update_from_episodes([_mended(bad)])))
    assert metrics[0] == metrics[1]


def _mended(batch: EpisodeBatch) -> EpisodeBatch:
    return replace(batch, rewards=np.nan_to_num(batch.rewards))
