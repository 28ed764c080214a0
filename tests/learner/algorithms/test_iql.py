"""IQL's losses against ones written out in float64, and what the expectile is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.float64 import Doubled

from juggler.driver.config import ConfigError, RunConfig
from juggler.learner.algorithms.iql.config import IqlConfig
from juggler.learner.algorithms.iql.core import Iql, expectile_loss
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.sequences import all_observations
from juggler.learner.core.transitions import rows_of_transitions, transitions
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.implicit_actor_critic import ImplicitActorCritic

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
NUMBER = spaces.Box(-2, 2, (1,), np.float32)
SPACES: dict[str, spaces.Space[Any]] = {"discrete": spaces.Discrete(2), "continuous": NUMBER}
MODEL = {"hidden_sizes": [8]}
GAMMA, EXPECTILE, BETA, SCALE = 0.9, 0.8, 2.0, 0.7


def make_core(space: spaces.Space[Any], **config: Any) -> Iql:
    make = partial(ImplicitActorCritic, VECTOR, space, MODEL)
    given = {"gamma": GAMMA, "expectile": EXPECTILE, "advantage_weight": BETA}
    return Iql(make, IqlConfig(reward_scale=SCALE, **given, **config))


def columns_of(make_batch: MakeBatch, space: spaces.Space[Any]) -> Columns:
    columns = collate([make_batch(4, 6, seed=1)])
    if space is NUMBER:
        generator = torch.Generator().manual_seed(0)
        columns["actions"] = torch.randn((4, 6, 1), generator=generator)
    return columns


class Slow:
    """The module itself with some parameters in float64, one observation at a time."""

    def __init__(self, space: spaces.Space[Any], parameters: torch.Tensor) -> None:
        self.module = Doubled(ImplicitActorCritic(VECTOR, space, MODEL), parameters)

    def outputs(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return self.module({name: x[None] for name, x in batch.items()})

    def value(self, observation: torch.Tensor) -> float:
        return float(self.outputs(observations=observation)["values"])

    def logp(self, observation: torch.Tensor, action: torch.Tensor) -> float:
        inputs = self.outputs(observations=observation)["action_dist_inputs"]
        return float(self.module.module.action_distribution()(inputs).log_prob(action[None]))

    def critics(self, observation: torch.Tensor, action: torch.Tensor) -> np.ndarray:
        values = self.outputs(observations=observation, actions=action)["q_values"][0]
        own = values if values.ndim == 1 else values[:, int(action)]  # [2], or [2, n]
        found: np.ndarray = own.numpy()
        return found


@pytest.mark.parametrize("kind", SPACES)
def test_the_losses_are_those_of_the_paper(make_batch: MakeBatch, kind: str) -> None:
    space = SPACES[kind]
    core, columns = make_core(space), dict(columns_of(make_batch, space))
    columns["importance_weights"] = weights = torch.tensor([1.0, 0.2, 0.5, 0.7])
    state = core.init(0)
    state["extra"]["target"] = core.init(5)["parameters"]
    own = Slow(space, state["parameters"])
    target = Slow(space, state["extra"]["target"])
    found, seen = transitions(columns, 1, GAMMA), all_observations(columns)
    value, critic, policy = [], [], []
    surprises = np.zeros((4, 6))
    for n, t in zip(*np.nonzero(columns["live"].numpy()), strict=True):
        x, action = columns["observations"][n, t], columns["actions"][n, t]
        gain = target.critics(x, action).min() - own.value(x)
        weight = float(weights[n])
        value.append(weight * abs(EXPECTILE - float(gain < 0)) * gain**2)
        goal = SCALE * float(found.rewards[n, t])
        goal += float(found.discounts[n, t]) * own.value(seen[found.after[n, t]])
        errors = goal - own.critics(x, action)  # [2]
        critic.append(weight * 0.5 * np.square(errors).sum())
        surprises[n, t] = np.abs(errors).mean()
        policy.append(-weight * min(np.exp(BETA * gain), 100.0) * own.logp(x, action))
    _, aux = core.grads(state, columns)
    metrics = {name: float(x) for name, x in aux.metrics.items()}
    assert metrics["value_loss"] == pytest.approx(np.mean(value), rel=1e-5)
    assert metrics["critic_loss"] == pytest.approx(np.mean(critic), rel=1e-5)
    assert metrics["policy_loss"] == pytest.approx(np.mean(policy), rel=1e-5)
    priorities = aux.priorities
    np.testing.assert_allclose(priorities, surprises.max(1), rtol=1e-5)


@pytest.mark.parametrize("kind", SPACES)
def test_drawn_transitions_have_the_gradient_of_the_rows_that_they_are_from(
    make_batch: MakeBatch, kind: str
) -> None:
    space = SPACES[kind]
    core, columns = make_core(space), columns_of(make_batch, space)
    state = core.init(0)
    expected, _ = core.grads(state, columns)
    found, _ = core.grads(state, rows_of_transitions(columns, 1, GAMMA))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_each_loss_trains_its_own_part_alone(make_batch: MakeBatch) -> None:
    """Values and critics learn nothing from the policy's loss."""
    core, columns = make_core(NUMBER), columns_of(make_batch, NUMBER)
    state = core.init(0)
    group = core.flat
    still, _ = core.grads(state, columns)
    other = make_core(NUMBER, importance_exponent=0.4)
    other.config.advantage_weight = 0.0
    changed, _ = other.grads(state, columns)
    for name, gradient in group.named(changed - still).items():
        of_policy = name.startswith(("encoder.", "policy_head."))
        assert bool(gradient.any()) == of_policy or name.endswith("log_std"), name


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.95])
def test_the_minimum_is_the_expectile(expectile: float) -> None:
    returns = torch.tensor([0.0, 1.0, 5.0, 10.0], dtype=torch.float64)
    grid = torch.linspace(0, 10, 10_001, dtype=torch.float64)  # [B]
    costs = expectile_loss(returns - grid.unsqueeze(1), expectile).mean(1)  # [B]
    best = float(grid[costs.argmin()])
    above = (returns - best).clamp(min=0).sum() * expectile
    below = (best - returns).clamp(min=0).sum() * (1 - expectile)
    assert float(above) == pytest.approx(float(below), abs=0.01), "the definition of an expectile"
    if expectile == 0.5:
        assert best == pytest.approx(4.0)


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match=r"expectile = 1\.0: must be at least 0\.5, below 1"):
        RunConfig.from_flat({"algorithm": "iql", "expectile": 1.0})
    with pytest.raises(UnsupportedSpace, match="acts in Box and Discrete spaces"):
        ImplicitActorCritic(VECTOR, spaces.MultiDiscrete([2, 2]), MODEL)
    with pytest.raises(ValueError, match="an encoder of your own cannot know"):
        ImplicitActorCritic(VECTOR, NUMBER, {"encoder": "mine:Encoder"})
