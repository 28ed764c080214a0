"""BC's loss and gradients against log-probabilities written out in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.states import copied

from juggler.learner.algorithms.bc.config import BcConfig
from juggler.learner.algorithms.bc.core import Bc
from juggler.learner.core.forward import Forward
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
MASKED = spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(2)})
TWO = spaces.Discrete(2)
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=[pytest.mark.long]) for n in (1, 2))])
def test_a_rule_of_choices_and_numbers_is_learned(make_batch: MakeBatch, seed: int) -> None:
    space = spaces.Dict({"side": TWO, "force": spaces.Box(-10, 10, (1,), np.float32)})
    learner = Learner(make_core(space, lr=1e-2, model={"hidden_sizes": [32]}), seed=seed)

    def done(number: int) -> EpisodeBatch:
        batch = make_batch(16, 16, seed=1000 * seed + number, ends=0.05)
        seen = np.asarray(batch.observations)
        actions = {
            "side": (seen[..., 0] > seen[..., 1]).astype(np.int64),
            "force": (seen[..., 2:3] - 0.5 * seen[..., 3:]).astype(np.float32),
        }
        return EpisodeBatch.from_tree({**batch.to_tree(), "actions": actions})

    for number in range(200):
        learner.update_from_episodes([done(number)])
    batch = done(500)
    seen = torch.from_numpy(np.asarray(batch.observations)).flatten(0, 1)
    module = build_module(None, VECTOR, space, {"hidden_sizes": [32]})
    weights = learner.get_params()
    module.load_state_dict(weights, strict=False)  # without the value function
    with torch.inference_mode():
        outputs = module.forward_inference({"observations": seen})["action_dist_inputs"]
        mode = module.action_distribution()(outputs).mode()
    expected = tree(batch.actions, lambda x: torch.from_numpy(x).flatten(0, 1))
    assert (mode["side"] == expected["side"]).float().mean() > 0.97
    error = (mode["force"] - expected["force"]).square().mean().sqrt()
    assert error < 0.15
