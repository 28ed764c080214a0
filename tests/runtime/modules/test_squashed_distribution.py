"""Gaussians squashed to the bounds of a Box."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.distribution_references import drawn, inputs_for
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from juggler.runtime.modules.distributions import (
    DiagGaussian,
    SquashedGaussian,
    distribution_for,
)

BOX = spaces.Box(np.array([-1, 0, 10], np.float32), np.array([1, 5, 11], np.float32))
ONE = spaces.Box(-1, 1, (1,), np.float32)


def reference(inputs: Tensor, space: spaces.Box) -> Independent:
    """In double precision, for inputs [..., 2 M]."""
    mean, log_std = inputs.double().chunk(2, -1)
    low, high = (torch.from_numpy(bound).double() for bound in (space.low, space.high))
    squash = [TanhTransform(), AffineTransform((low + high) / 2, (high - low) / 2)]
    return Independent(TransformedDistribution(Normal(mean, log_std.exp()), squash), 1)


def test_log_prob_is_that_of_torch_distributions() -> None:
    spec = distribution_for(BOX, squash=True)
    inputs = inputs_for(spec, 500)
    actions = drawn(spec, inputs)
    expected = reference(inputs, BOX).log_prob(actions.double())
    torch.testing.assert_close(
        spec(inputs).log_prob(actions).double(), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("distance", [1e-3, 1e-5, 1e-6])
@pytest.mark.parametrize("side", [-1, 1])
def test_log_prob_is_exact_close_to_the_bounds(distance: float, side: int) -> None:
    spec = distribution_for(ONE, squash=True)
    inputs = torch.tensor([[side * 5.0, 0.3]])
    actions = torch.tensor([[side * (1 - distance)]])
    expected = reference(inputs, ONE).log_prob(actions.double())
    torch.testing.assert_close(
        spec(inputs).log_prob(actions).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_log_prob_and_its_gradient_are_finite_at_the_bounds_and_beyond() -> None:
    spec = distribution_for(BOX, squash=True)
    low, high = torch.from_numpy(BOX.low), torch.from_numpy(BOX.high)
    actions = torch.stack([low, high, low - 1, high + 1])
    inputs = inputs_for(spec, 4).requires_grad_()
    log_prob = spec(inputs).log_prob(actions)
    (gradient,) = torch.autograd.grad(log_prob.sum(), inputs)
    assert log_prob.isfinite().all()
    assert gradient.isfinite().all()


def test_density_integrates_to_one() -> None:
    spec = distribution_for(ONE, squash=True)
    actions = torch.linspace(-1, 1, 200_001)[1:-1].unsqueeze(-1)
    for mean, log_std in ((0.0, 0.0), (0.7, -1.0), (-1.0, 0.3)):
        inputs = torch.tensor([mean, log_std]).expand(len(actions), -1)
        total = spec(inputs).log_prob(actions).double().exp().sum() * 2 / 200_000
        assert abs(total - 1) < 1e-3


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
def test_actions_keep_within_the_bounds_and_have_finite_log_probs(scale: float) -> None:
    box = spaces.Box(
        np.array([-1, 0, 10, -1e-3, 0.1]), np.array([1, 5, 11, 1e6, 0.7]), dtype=np.float64
    )
    spec = distribution_for(box, squash=True)
    inputs = inputs_for(spec, 2000)
    inputs[:, :5] *= scale
    for actions in (drawn(spec, inputs), spec(inputs).mode()):
        assert (actions.double() > torch.from_numpy(box.low)).all()
        assert (actions.double() < torch.from_numpy(box.high)).all()
        assert spec(inputs).log_prob(actions).isfinite().all()


def test_samples_are_those_of_the_squashed_normal() -> None:
    spec = distribution_for(BOX, squash=True)
    inputs = inputs_for(spec)
    many = 40_000
    actions = drawn(spec, inputs.expand(many, -1))
    torch.manual_seed(5)
    expected = reference(inputs, BOX).sample((many,)).float()
    width = torch.from_numpy(BOX.high - BOX.low)
    for q in (0.05, 0.5, 0.95):
        gap = (actions.quantile(q, dim=0) - expected.quantile(q, dim=0)) / width
        assert gap.abs().max() < 0.01


def test_the_mode_is_the_median() -> None:
    spec = distribution_for(BOX, squash=True)
    inputs = inputs_for(spec)
    actions = drawn(spec, inputs.expand(40_000, -1))
    below = (actions < spec(inputs).mode()).float().mean(0)
    torch.testing.assert_close(below, torch.full((3,), 0.5), atol=0.01, rtol=0)


def test_entropy_is_within_its_error_for_every_mean_and_deviation() -> None:
    mean = torch.tensor([0.0, 0.1, -0.5, 1, 2, -4, 8, 15]).repeat_interleave(9)  # [B]
    log_std = torch.linspace(-5, 3, 9).repeat(8)  # [B]
    spec = distribution_for(spaces.Box(0, 5, (1,), np.float32), squash=True)
    found = spec(torch.stack([mean, log_std], -1)).entropy()  # [B]
    # H(a) = H(u) + E log |da/du|, the mean by the trapezoidal rule over u.
    z = torch.linspace(-9, 9, 20_001, dtype=torch.float64)  # [points]
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)  # [points]
    u = mean.double()[:, None] + log_std.double().exp()[:, None] * z  # [B, points]
    log_slope = math.log(5 / 2) + TanhTransform().log_abs_det_jacobian(u, None)  # [B, points]
    normal = Normal(mean.double(), log_std.double().exp())
    expected = normal.entropy() + torch.trapezoid(density * log_slope, z)  # [B]
    assert (found - expected).abs().max() < 1e-4


def test_kl_is_that_before_squashing() -> None:
    spec = distribution_for(BOX, squash=True)
    one, other = inputs_for(spec, 6, seed=1), inputs_for(spec, 6, seed=2)
    pair = (reference(x, BOX).base_dist.base_dist for x in (one, other))
    expected = kl_divergence(*pair).sum(-1).float()
    torch.testing.assert_close(spec(one).kl(spec(other)), expected)
    many = 40_000
    actions = drawn(spec, one[0].expand(many, -1))
    ratios = spec(one[0].expand(many, -1)).log_prob(actions) - spec(
        other[0].expand(many, -1)
    ).log_prob(actions)
    assert (ratios.mean() - spec(one).kl(spec(other))[0]).abs() < 5 * ratios.std() / many**0.5


def test_only_elements_with_two_finite_and_different_bounds_are_squashed() -> None:
    low = np.array([-1, -np.inf, 0, 3, -3e38, 1e6], np.float32)
    high = np.array([1, 1, np.inf, 3, 3e38, 1e6 + 1], np.float32)
    box = spaces.Box(low, high)
    squashed, plain = distribution_for(box, squash=True), distribution_for(box)
    inputs = inputs_for(squashed, 50)
    policy, other = squashed(inputs), plain(inputs)
    assert isinstance(policy, SquashedGaussian)
    actions, others = drawn(squashed, inputs), drawn(plain, inputs)
    assert torch.equal(actions[:, 1:], others[:, 1:])
    assert (actions[:, 0].abs() < 1).all()
    alone = inputs[:, [0, 6]]
    first = distribution_for(ONE, squash=True)(alone)
    rest = distribution_for(spaces.Box(-1, 1, (5,)))(inputs[:, [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]])
    torch.testing.assert_close(
        policy.log_prob(actions), first.log_prob(actions[:, :1]) + rest.log_prob(actions[:, 1:])
    )
    torch.testing.assert_close(policy.entropy(), first.entropy() + rest.entropy())
    torch.testing.assert_close(policy.kl(policy), other.kl(other))


def test_nothing_is_squashed_unless_asked_for_or_without_bounds() -> None:
    assert type(distribution_for(BOX)(torch.zeros(6))) is DiagGaussian
    endless = spaces.Box(-np.inf, 1, (3,), np.float32)
    assert type(distribution_for(endless, squash=True)(torch.zeros(6))) is DiagGaussian
    inner = distribution_for(spaces.Dict(a=BOX), squash=True)(torch.zeros(6))
    assert type(inner.parts["a"]) is SquashedGaussian


def test_double_precision_stays_double() -> None:
    spec = distribution_for(BOX, squash=True)
    inputs = inputs_for(spec, 4).double()
    policy = spec(inputs)
    actions = drawn(spec, inputs)
    assert policy.log_prob(actions).dtype == policy.entropy().dtype == torch.float64
