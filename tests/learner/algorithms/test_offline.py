"""BC and IQL against losses written out in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import TWO, VECTOR, MakeBatch
from support.small_cores import Doubled, copied

from juggler.driver.config import ConfigError, RunConfig
from juggler.learner.algorithms.bc import BcConfig
from juggler.learner.algorithms.bc.core import Bc
from juggler.learner.algorithms.iql import IqlConfig
from juggler.learner.algorithms.iql.core import Iql
from juggler.learner.core.forward import Forward
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.returns import transitions
from juggler.learner.core.sequences import all_observations
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.models import ImplicitActorCritic
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.wire.errors import UnsupportedSpace

MASKED = spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(2)})
NUMBERS = spaces.Box(-10, 10, (2,), np.float32)


def make_core(
    action_space: Any = TWO, observation_space: Any = VECTOR, model: Any = None, **config: Any
) -> Bc:
    given = {"hidden_sizes": [8], **(model or {})}
    make = partial(build_module, None, observation_space, action_space, given)
    return Bc(make, BcConfig(**config))


def outputs_of(core: Bc, state: Any, observations: Any) -> np.ndarray:
    """The policy's outputs [N, T, D] for every step, in float64."""
    forward = Forward(core.flat, state["parameters"], state["buffers"])
    n, t = batch_shape(observations)
    flat = tree(observations, lambda x: torch.from_numpy(x).flatten(0, 1))
    outputs = forward({"observations": flat})["action_dist_inputs"]
    return outputs.detach().double().numpy().reshape(n, t, -1)


def batch_shape(observations: Any) -> tuple[int, int]:
    leaf = observations["observation"] if isinstance(observations, dict) else observations
    return leaf.shape[:2]


def tree(values: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(values, dict):
        return {key: function(each) for key, each in values.items()}
    return function(values)


def loss_of(core: Bc, batch: EpisodeBatch) -> tuple[dict[str, float], Any]:
    state = core.init(seed=3)
    before = state["parameters"].clone()
    output = core.step(copied(state), collate([batch]))
    assert not torch.equal(before, output.state["parameters"])
    return fetch_metrics(output.metrics), state


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_for_choices_is_minus_their_log_probability(
    make_batch: MakeBatch, masked: bool
) -> None:
    batch = make_batch(5, 7, seed=1)
    core = make_core(observation_space=MASKED if masked else VECTOR)
    columns: dict[str, Any] = {}
    if masked:
        masks = np.random.default_rng(0).integers(0, 2, (5, 7, 2)).astype(np.int8)
        np.put_along_axis(masks, np.asarray(batch.actions)[..., None], 1, -1)
        ones = partial(np.ones, dtype=np.int8)
        columns = {
            "observations": {"observation": batch.observations, "action_mask": masks},
            "last_observations": {
                "observation": batch.last_observations,
                "action_mask": ones((5, 2)),
            },
            "final_observations": {
                "observation": batch.final_observations,
                "action_mask": ones((len(batch.final_rows), 2)),
            },
        }
        batch = EpisodeBatch.from_tree({**batch.to_tree(), **columns})
    metrics, state = loss_of(core, batch)
    logits = outputs_of(core, state, batch.observations)
    logp = log_softmax(logits)
    chosen = np.take_along_axis(logp, np.asarray(batch.actions)[..., None], -1)[..., 0]
    probabilities = np.exp(logp)
    entropy = -(probabilities * np.where(probabilities > 0, logp, 0)).sum(-1)
    live = batch.live
    assert metrics["policy_loss"] == pytest.approx(-chosen[live].mean(), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy[live].mean(), rel=1e-4)


def test_the_loss_for_numbers_is_minus_the_logarithm_of_their_density(
    make_batch: MakeBatch,
) -> None:
    actions = np.random.default_rng(0).standard_normal((5, 7, 2)).astype(np.float32)
    batch = make_batch(5, 7, seed=1, actions=actions)
    core = make_core(NUMBERS)
    metrics, state = loss_of(core, batch)
    mean, log_std = np.split(outputs_of(core, state, batch.observations), 2, -1)
    z = (actions.astype(np.float64) - mean) / np.exp(log_std)
    logp = -(0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi)).sum(-1)
    entropy = (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)
    assert metrics["policy_loss"] == pytest.approx(-logp[batch.live].mean(), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy[batch.live].mean(), rel=1e-5)


def test_rewards_and_unknown_log_probabilities_make_no_difference(make_batch: MakeBatch) -> None:
    batch = make_batch(4, 6, seed=2)
    zero = np.zeros((4, 6), np.float32)
    other = EpisodeBatch.from_tree({**batch.to_tree(), "rewards": zero, "action_logp": zero})
    core = make_core()
    state = core.init(seed=0)
    found = [core.step(copied(state), collate([each])).state for each in (batch, other)]
    torch.testing.assert_close(found[0]["parameters"], found[1]["parameters"], rtol=0, atol=0)


# IQL's losses against ones written out in float64, and what the expectile is.


NUMBER = spaces.Box(-2, 2, (1,), np.float32)
SPACES: dict[str, spaces.Space[Any]] = {"discrete": spaces.Discrete(2), "continuous": NUMBER}
MODEL = {"hidden_sizes": [8]}
GAMMA, EXPECTILE, BETA, SCALE = 0.9, 0.8, 2.0, 0.7


def make_core_of_iql(space: spaces.Space[Any], **config: Any) -> Iql:
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
    """The module in float64, for one observation at a time."""

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
    core, columns = make_core_of_iql(space), dict(columns_of(make_batch, space))
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


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match=r"expectile = 1\.0: must be at"):
        RunConfig.from_flat({"algorithm": "iql", "expectile": 1.0})
    with pytest.raises(UnsupportedSpace, match="acts in Box and Discrete spaces"):
        ImplicitActorCritic(VECTOR, spaces.MultiDiscrete([2, 2]), MODEL)
    with pytest.raises(ValueError, match="which your own encoder cannot do"):
        ImplicitActorCritic(VECTOR, NUMBER, {"encoder": "mine:Encoder"})
