"""Action distributions against torch.distributions, and what sampling promises."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from juggler.runtime.modules.distributions import DistributionSpec, distribution_for
from juggler.runtime.modules.errors import UnsupportedSpace

DISCRETE = spaces.Discrete(5)
SHIFTED = spaces.Discrete(5, start=-2)
MATRIX = spaces.Box(-1, 1, (2, 3), np.float32)
SCALAR = spaces.Box(-1, 1, (), np.float64)
ALL = [DISCRETE, SHIFTED, MATRIX, SCALAR]


def inputs_for(spec: DistributionSpec, *leading: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*leading, spec.inputs_size, generator=generator)


def reference(space: gymnasium.Space, inputs: Tensor) -> torch.distributions.Distribution:
    if isinstance(space, spaces.Discrete):
        return torch.distributions.Categorical(logits=inputs)
    mean, log_std = inputs.chunk(2, -1)
    return torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)


def as_reference(space: gymnasium.Space, actions: Tensor, spec: DistributionSpec) -> Tensor:
    """Our actions as torch's distribution has them."""
    if isinstance(space, spaces.Discrete):
        return actions - int(space.start)
    return actions.reshape(*actions.shape[: actions.ndim - len(space.shape)], spec.noise_size)


@pytest.mark.parametrize("space", ALL, ids=str)
@pytest.mark.parametrize("leading", [(), (7,), (4, 6)])
def test_log_prob_and_entropy_are_those_of_torch_distributions(
    space: gymnasium.Space, leading: tuple[int, ...]
) -> None:
    spec = distribution_for(space)
    inputs = inputs_for(spec, *leading)
    distribution = spec(inputs)
    actions = distribution.sample(spec.draw_noise(leading, torch.Generator().manual_seed(1)))
    torch_distribution = reference(space, inputs)
    expected = torch_distribution.log_prob(as_reference(space, actions, spec))
    assert actions.shape == (*leading, *space.shape)
    assert actions.dtype == spec.action_dtype
    torch.testing.assert_close(distribution.log_prob(actions), expected)
    torch.testing.assert_close(distribution.entropy(), torch_distribution.entropy())


@pytest.mark.parametrize("space", ALL, ids=str)
def test_kl_is_that_of_torch_distributions(space: gymnasium.Space) -> None:
    spec = distribution_for(space)
    one, other = inputs_for(spec, 9, seed=1), inputs_for(spec, 9, seed=2)
    expected = torch.distributions.kl_divergence(reference(space, one), reference(space, other))
    torch.testing.assert_close(spec(one).kl(spec(other)), expected)
    torch.testing.assert_close(spec(one).kl(spec(one)), torch.zeros(9), atol=1e-6, rtol=0)


def test_kl_between_different_kinds_is_refused() -> None:
    categorical = distribution_for(DISCRETE)(torch.zeros(5))
    gaussian = distribution_for(SCALAR)(torch.zeros(2))
    with pytest.raises(TypeError, match="not defined"):
        categorical.kl(gaussian)
    with pytest.raises(TypeError, match="not defined"):
        gaussian.kl(categorical)


def test_categorical_samples_come_as_often_as_their_probabilities() -> None:
    spec = distribution_for(SHIFTED)
    inputs = inputs_for(spec)
    noise = spec.draw_noise((100_000,), torch.Generator().manual_seed(3))
    actions = spec(inputs.expand(100_000, -1)).sample(noise)
    frequencies = torch.bincount(actions + 2, minlength=5) / 100_000
    torch.testing.assert_close(frequencies, inputs.softmax(-1), atol=0.01, rtol=0)


def test_gaussian_samples_have_the_mean_and_deviation_of_the_inputs() -> None:
    spec = distribution_for(MATRIX)
    inputs = inputs_for(spec)
    noise = spec.draw_noise((100_000,), torch.Generator().manual_seed(3))
    actions = spec(inputs.expand(100_000, -1)).sample(noise)
    mean, log_std = inputs.chunk(2)
    torch.testing.assert_close(actions.mean(0), mean.reshape(2, 3), atol=0.05, rtol=0)
    torch.testing.assert_close(actions.std(0), log_std.exp().reshape(2, 3), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("space", ALL, ids=str)
def test_the_same_generator_state_draws_the_same_noise(space: gymnasium.Space) -> None:
    spec = distribution_for(space)
    draws = [spec.draw_noise((3, 4), torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert draws[0].shape == (3, 4, spec.noise_size)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_the_mode_is_the_likeliest_action() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 0.0, 0.0])
    assert distribution_for(DISCRETE)(logits).mode() == 1
    assert distribution_for(SHIFTED)(logits).mode() == -1
    gaussian = distribution_for(MATRIX)(torch.arange(12.0))
    assert torch.equal(gaussian.mode(), torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3]),
        spaces.Dict(a=DISCRETE),
        spaces.Box(0, 255, (3,), np.uint8),
        spaces.Box(0, 1, (0,), np.float32),
    ],
    ids=str,
)
def test_an_action_space_that_nothing_serves_is_named(space: gymnasium.Space) -> None:
    with pytest.raises(UnsupportedSpace) as caught:
        distribution_for(space)
    assert str(space) in str(caught.value)
