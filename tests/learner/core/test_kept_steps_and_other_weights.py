"""What becomes of kept steps when a learner begins anew, or with weights from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.q_network import QNetwork

MakeBatch = Callable[..., EpisodeBatch]
VECTOR, TWO = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)


def make_core(**config: Any) -> Dqn:
    make = partial(QNetwork, VECTOR, TWO, {"hidden_sizes": [8]})
    return Dqn(make, DqnConfig(**config))


@pytest.mark.parametrize("how", ["reset", "set_weights"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_learner_that_begins_with_other_weights_learns_from_none_of_its_old_steps(
    make_batch: MakeBatch, how: str, saved: bool
) -> None:
    """And one that is resumed meanwhile draws the same afterwards."""

    def begin(learner: Learner) -> None:
        if how == "reset":
            learner.reset(7)
        else:
            learner.set_weights(Learner(make_core(), seed=7).get_weights(), whole=True)

    keys = {"replay_begin": 30, "replay_batch_size": 8, "save_replay": saved}
    one, other = (Learner(make_core(**keys)) for _ in range(2))
    other._data = make_core(**keys).data_source(seed=1)  # of a process that has another seed
    for seed in range(3):
        one.update_from_episodes([make_batch(4, 6, seed=seed)])
    other.restore(*one.save())
    one.forget()
    for learner in (one, other):
        begin(learner)
        assert not learner.kept_rows()
    batches = [make_batch(4, 6, seed=seed) for seed in (8, 9)]
    assert batches[0].live_steps < 30 <= sum(batch.live_steps for batch in batches)
    told = [[learner.update_from_episodes([each]) for each in batches] for learner in (one, other)]
    assert told[0][0] == {} != told[0][1]
    assert one.kept_rows() == sum(batch.live_steps for batch in batches)
    np.testing.assert_equal(one.get_weights(), other.get_weights())
