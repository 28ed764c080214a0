"""Learners of a group that keep steps: what each of them draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.groups import join, update

from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.data.replay.replay import draw_apart
from juggler.learner.data.sources import Columns, Sums
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.q_network import QNetwork

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)


def dqn(**config: Any) -> Learner:
    make = partial(QNetwork, VECTOR, TWO, {"hidden_sizes": [8]})
    own = {"replay_begin": 1, "replay_batch_size": 32, "replay_ratio": 4.0, **config}
    return Learner(Dqn(make, DqnConfig(**own)), seed=3)


def impala(**config: Any) -> Learner:
    make = partial(ActorCritic, VECTOR, TWO, {"hidden_sizes": [8]})
    own = ImpalaConfig(replay_share=0.5, save_replay=True, **config)
    return Learner(Impala(make, own), seed=3)


def told(learner: Learner, samples: list[Any]) -> None:
    """Have it put each sample that it learns from into this list, too."""
    add = learner._data.add

    def adding(sample: Columns, sums: Sums) -> Iterator[Columns]:
        for drawn in add(sample, sums):
            samples.append(drawn)
            yield drawn

    learner._data.add = adding  # type: ignore[method-assign]


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_learners_that_go_on_from_one_replay_draw_different_rows_from_it(
    make_batch: MakeBatch, alpha: float
) -> None:
    group = [dqn(priority_exponent=alpha) for _ in range(2)]
    join(group)
    for seed in range(4):
        update(group, [[make_batch(4, 16, seed=2 * seed + own)] for own in range(2)])
    join(group)  # as when one of them is lost and another one takes its place
    drawn: list[list[Any]] = [[], []]
    for learner, samples in zip(group, drawn, strict=True):
        told(learner, samples)
    update(group, [[make_batch(1, 1, seed=100 + own)] for own in range(2)])
    for _ in range(3):
        update(group, [[make_batch(4, 16, seed=200)] for _ in range(2)])
    assert len(drawn[0]) == len(drawn[1]) > 5, "as often as one another"
    same = [
        torch.equal(one["observations"], other["observations"])
        for one, other in zip(*drawn, strict=True)
    ]
    assert not any(same)


def test_learners_that_go_on_from_one_table_mix_different_old_rows_in(
    make_batch: MakeBatch,
) -> None:
    group = [impala() for _ in range(2)]
    join(group)
    for seed in range(6):
        update(group, [[make_batch(4, 16, seed=2 * seed + own)] for own in range(2)])
    join(group)
    drawn: list[list[Any]] = [[], []]
    for learner, samples in zip(group, drawn, strict=True):
        told(learner, samples)
    for _ in range(3):
        update(group, [[make_batch(4, 16, seed=200)] for _ in range(2)])
    old = [[sample["observations"][4:] for sample in samples] for samples in drawn]
    assert all(len(rows) for rows in old[0] + old[1])
    assert not any(
        one.shape == other.shape and torch.equal(one, other)
        for one, other in zip(*old, strict=True)
    )


def test_a_learner_whose_replay_may_run_out_joins_no_others(make_batch: MakeBatch) -> None:
    group = [dqn(max_times_sampled=1, replay_ratio=1.0, replay_batch_size=4) for _ in range(2)]
    assert all(each.why_alone() for each in group)
    with pytest.raises(ValueError, match="max_times_sampled = 1 with several learners"):
        join(group)
    group[0].join(None)
    assert group[0].update_from_episodes([make_batch()])


def test_the_first_of_a_group_goes_on_with_the_draws_that_it_would_have_made() -> None:
    """Also with the half of a number that is left from a draw: the next draw begins with it."""
    own, apart, other = (np.random.default_rng(0) for _ in range(3))
    for generator in (own, apart, other):
        generator.integers(100, dtype=np.int32)
    draw_apart(apart, 0)
    draw_apart(other, 1)
    drawn = own.integers(100, size=20, dtype=np.int32)
    np.testing.assert_array_equal(apart.integers(100, size=20, dtype=np.int32), drawn)
    assert (other.integers(100, size=20, dtype=np.int32) != drawn).any()
