"""clip_rewards, scale_rewards and normalize_rewards."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_episodes import as_tensors, fragments
from test_contexts import in_runner

from juggler.runtime.acting.actor import Contexts
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.learning import ClipRewards, NormalizeRewards, ScaleRewards
from juggler.runtime.connectors.mergeable_state import Moments
from juggler.runtime.connectors.pipelines import build_env_to_module, build_learner_pipeline

SPACES = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)


def test_rewards_are_clipped_and_scaled_in_columns_of_their_own() -> None:
    columns = {"rewards": torch.tensor([[3.0, -0.5, -2.0]]), "live": torch.ones(1, 3).bool()}
    assert ClipRewards(*SPACES)(columns)["rewards"].tolist() == [[1, -0.5, -1]]
    assert ClipRewards(*SPACES, limit=2)(columns)["rewards"].tolist() == [[2, -0.5, -2]]
    assert ScaleRewards(*SPACES, factor=0.5)(columns)["rewards"].tolist() == [[1.5, -0.25, -1]]
    assert columns["rewards"].tolist() == [[3, -0.5, -2]]


@settings(max_examples=60)
@given(
    mode=st.sampled_from([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]),
    rows=st.integers(1, 3),
    steps=st.integers(1, 6),
    ends=st.sampled_from([0.0, 0.1, 0.5]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 1 << 20),
)
def test_rewards_are_divided_by_the_deviation_of_all_discounted_returns_so_far(
    mode, rows, steps, ends, gamma, seed
) -> None:
    config = ConnectorsConfig(learner=[{"use": "normalize_rewards", "gamma": gamma}])
    contexts = Contexts(build_env_to_module(config, *SPACES).contexts)
    learner = build_learner_pipeline(config, *SPACES)
    returns = []
    played = fragments(*SPACES, rows=rows, steps=steps, mode=mode, ends=ends, seed=seed)
    for fragment in islice(played, 4):
        seen, states = in_runner(contexts, fragment)
        np.testing.assert_array_equal(seen, fragment.columns["observations"])
        for row, pasts in enumerate(fragment.pasts):
            for t, past in enumerate(pasts):
                if fragment.columns["live"][row, t]:
                    rewards = [*past.rewards, fragment.columns["rewards"][row, t]]
                    powers = gamma ** np.arange(len(rewards))[::-1]
                    returns.append(float(powers @ np.array(rewards)))
        columns = as_tensors({**fragment.columns, "states": {"connectors": states}})
        result = learner(columns)["rewards"].numpy()
        scale = 1 / np.sqrt(np.var(returns) + 1e-8)
        expected = np.clip(fragment.columns["rewards"] * scale, -10, 10)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-5)
    arrays = {key: value.numpy() for key, value in learner.get_state()["normalize_rewards"].items()}
    moments, all_of_them = Moments.from_tree(arrays), Moments.of(np.array(returns))
    np.testing.assert_allclose(moments.mean, all_of_them.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moments.m2, all_of_them.m2, rtol=1e-4, atol=1e-5)
    assert moments.count == len(returns)


def columns_of(rewards: torch.Tensor) -> dict:
    live = torch.ones(rewards.shape, dtype=torch.bool)
    return {
        "rewards": rewards,
        "live": live,
        "terminated": ~live,
        "truncated": ~live,
        "states": {"connectors": {"discounted_returns": torch.zeros(len(rewards))}},
    }


def test_a_normalization_goes_on_from_its_state() -> None:
    first, second = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(0))
    one, other = NormalizeRewards(*SPACES), NormalizeRewards(*SPACES)
    one(columns_of(first))
    other.set_state(one.get_state())
    expected = one(columns_of(second))["rewards"]
    assert torch.equal(other(columns_of(second))["rewards"], expected)
    assert not torch.equal(NormalizeRewards(*SPACES)(columns_of(second))["rewards"], expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClipRewards(*SPACES, limit=0),
        lambda: ScaleRewards(*SPACES, factor=float("inf")),
        lambda: NormalizeRewards(*SPACES, gamma=1.5),
        lambda: NormalizeRewards(*SPACES, epsilon=0),
    ],
)
def test_options_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()
