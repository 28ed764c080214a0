"""Random network distillation where episodes end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from juggler.envrunner.sampler import Sampler
from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.intrinsic.rnd import Rnd
from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.around_config import IntrinsicConfig
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.learner_core import ALONE, Columns
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.core.transitions import rows_of_transitions
from juggler.learner.data.collate import collate
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.q_network import QNetwork

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)
MODEL = {"hidden_sizes": [8]}
INNER: dict[str, Callable[[], GradientCore]] = {
    "ppo": lambda: Ppo(partial(ActorCritic, VECTOR, TWO, MODEL), PpoConfig()),
    "dqn": lambda: Dqn(partial(QNetwork, VECTOR, TWO, MODEL), DqnConfig(n_step=1)),
}


class Walk(gym.Env[np.ndarray, int]):
    """Two steps to an end, whose observation is one of its own where it is new."""

    observation_space, action_space = VECTOR, TWO

    def __init__(self, terminates: bool, new: bool) -> None:
        self.terminates, self.new, self.place = terminates, new, 0

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self.place = 0
        return self.seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        over = self.place == 1
        self.place += 1 + (over and self.new)
        return self.seen(), 0.0, over and self.terminates, over and not self.terminates, {}

    def seen(self) -> np.ndarray:
        return np.eye(4, dtype=np.float32)[self.place]


def walked(mode: AutoresetMode, terminates: bool, *, new: bool) -> Columns:
    env = SyncVectorEnv([partial(Walk, terminates, new)] * 4, autoreset_mode=mode)
    policy = Actor(QNetwork(VECTOR, TWO, MODEL), 4, 12, 0)
    columns: Columns = collate([Sampler(env, policy, 12, 0).sample((0, 0)).batch])
    env.close()
    return columns


@pytest.mark.parametrize("drawn", [False, True], ids=["of a row", "drawn"])
@pytest.mark.parametrize("terminates", [False, True], ids=["truncated", "terminated"])
def test_the_bonus_of_an_end_is_the_same_with_each_autoreset_mode(
    terminates: bool, drawn: bool
) -> None:
    core = Rnd(INNER["dqn"](), IntrinsicConfig(predictor_share=1.0, features=16))
    state, found = core.init(0), []
    usual = walked(AutoresetMode.SAME_STEP, terminates, new=False)
    for _ in range(100):
        state = core.step(state, usual).state
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        columns = walked(mode, terminates, new=True)
        if drawn:
            columns = rows_of_transitions(columns, 1, 0.9)
        shown, live = core.shown(state, columns), columns["live"]
        bonus = (shown["rewards"] - columns["rewards"])[live]  # [M]
        place = columns["observations"][live].argmax(-1)  # [M]
        found.append([float(bonus[place == at].mean()) for at in (0, 1)])
    np.testing.assert_allclose(*found, rtol=1e-5)
    usual_bonus, bonus_of_end = found[0]
    assert bonus_of_end == 0.0 if terminates else bonus_of_end > 10 * usual_bonus > 0


def test_a_sample_in_which_every_step_terminates_is_learned_from(make_batch: MakeBatch) -> None:
    ends = np.ones((2, 3), np.bool_)
    batch = make_batch(2, 3, ends=0.0, terminated=ends, truncated=~ends)
    for name, inner in INNER.items():
        core = Rnd(inner(), IntrinsicConfig(features=4, model=MODEL))
        output = core.step(core.init(0), collate([batch]))
        metrics = fetch_metrics(output.metrics)
        assert metrics["novelty"] == metrics["intrinsic_reward"] == 0.0, name
        assert all(np.isfinite(list(metrics.values()))), name


@pytest.mark.parametrize("name", INNER)
def test_what_stands_behind_a_row_that_terminated_makes_no_difference(
    make_batch: MakeBatch, name: str
) -> None:
    """Nobody need know it: a simulator whose agent pauses then shows nothing at all."""
    ends = np.zeros((3, 5), np.bool_)
    ends[:, -1] = True
    batch = make_batch(3, 5, ends=0.0, terminated=ends)
    core = Rnd(INNER[name](), IntrinsicConfig(features=4, model=MODEL))
    columns = collate([batch])
    others = {**columns, "last_observations": columns["last_observations"] + 3.0}
    one, other = (core.step(core.init(0), each) for each in (columns, others))
    torch.testing.assert_close(one.state, other.state, rtol=0, atol=0)
    assert fetch_metrics(one.metrics) == fetch_metrics(other.metrics)


@pytest.mark.parametrize(
    "inner",
    [partial(Impala, config=ImpalaConfig(burn_in=3)), partial(Ppo, config=PpoConfig(burn_in=3))],
)
def test_nothing_is_aimed_at_in_a_burn_in(
    make_batch: MakeBatch, inner: Callable[..., GradientCore]
) -> None:
    model = {**MODEL, "recurrent": "gru", "recurrent_size": 4}
    make = partial(ActorCritic, VECTOR, TWO, model)
    core = Rnd(inner(make), IntrinsicConfig(features=4, model=MODEL))
    offsets = np.full(2, 7, np.int32)  # both rows go on with an episode from before
    states = {"module": {"hidden": np.zeros((2, 4), np.float32)}}
    batch = make_batch(2, 3, ends=0.0, segment_offsets=offsets, states=states)
    metrics = core.learned(core.init(0), collate([batch]), ALONE)[2]
    assert float(metrics["intrinsic_value_loss"]) == 0.0
    assert float(metrics["predictor_loss"]) > 0.0
