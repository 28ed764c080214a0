"""Gaussians squashed to the bounds of a Box."""

from __future__ import annotations

import inspect
import math
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.scripted_modules import drawn, inputs_for
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

from juggler.runtime.modules.distributions.base import (
    ActionDistribution,
    ClippedGaussian,
    ClippedGaussianSpec,
    DiagGaussian,
    DistributionSpec,
    SquashedGaussian,
)
from juggler.runtime.modules.distributions.for_space import CompositeSpec, distribution_for

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


# Gaussians around squashed means, clipped to the bounds of a Box.


LOW, HIGH = np.array([-2.0]), np.array([5.0])
SPEC = ClippedGaussianSpec(LOW, HIGH)
INPUTS = ([0.0, -1.0], [0.4, 0.5], [-1.5, -0.5], [1.0, -3.0])


def parts(inputs: list[float]) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Probabilities of both bounds, and points between them with their densities."""
    u, log_share = inputs
    centre = -2 + 7 * (1 + math.tanh(u)) / 2
    scale = math.exp(log_share) * 3.5
    points = np.linspace(-2, 5, 200_001)
    densities = np.exp(-0.5 * ((points - centre) / scale) ** 2) / (scale * math.sqrt(2 * math.pi))
    below, above = (
        0.5 * math.erfc(distance / scale / math.sqrt(2)) for distance in (centre + 2, 5 - centre)
    )
    return below, above, points, densities


def of(inputs: list[float]) -> ClippedGaussian:
    return SPEC(torch.tensor(inputs, dtype=torch.float64))


@pytest.mark.parametrize("inputs", INPUTS)
def test_log_prob_is_of_a_density_between_the_bounds_and_of_masses_at_them(
    inputs: list[float],
) -> None:
    below, above, points, densities = parts(inputs)
    assert below + above + np.trapezoid(densities, points) == pytest.approx(1)
    actions = torch.tensor([[-2.0], [5.0], [0.1], [3.0]], dtype=torch.float64)
    distribution = SPEC(torch.tensor([inputs] * 4, dtype=torch.float64))
    found = distribution.log_prob(actions).exp()
    expected = [below, above, *(np.interp(x, points, densities) for x in (0.1, 3.0))]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-9)


def test_an_infinite_deviation_stands_for_uniform_actions() -> None:
    inputs = torch.tensor([0.9, math.inf]).expand(100_000, 2)
    distribution, exact = SPEC(inputs), of([0.9, math.inf])
    actions = distribution.sample(SPEC.draw_noise((100_000,), torch.Generator().manual_seed(0)))
    shares = (actions.flatten() + 2) / 7
    torch.testing.assert_close(
        shares.sort().values, torch.linspace(0, 1, 100_000), rtol=0, atol=0.01
    )
    extremes = SPEC(inputs[:3]).sample(torch.tensor([[-30.0], [0.0], [30.0]]))
    torch.testing.assert_close(extremes, torch.tensor([[-2.0], [1.5], [5.0]]))
    ends = torch.tensor([[-2.0], [1.5], [5.0]], dtype=torch.float64)
    found = SPEC(torch.tensor([[0.9, math.inf]] * 3, dtype=torch.float64)).log_prob(ends)
    np.testing.assert_allclose(found.numpy(), -math.log(7))
    assert float(exact.mode()) == pytest.approx(-2 + 3.5 * (1 + math.tanh(0.9)))
    assert (
        SPEC.why_not_finite(torch.tensor([math.nan, math.inf])) == "output 0 of the policy is nan"
    )


@pytest.mark.parametrize("action", [-2.0, 1.5, 5.0])
def test_gradients_are_zero_where_actions_are_uniform_and_the_usual_ones_beside(
    action: float,
) -> None:
    spec = ClippedGaussianSpec(np.repeat(LOW, 2), np.repeat(HIGH, 2))

    def gradients(spec: ClippedGaussianSpec, inputs: list[float], size: int) -> list[torch.Tensor]:
        """Those of log-probabilities and actions by the outputs."""
        found = []
        actions, noise = torch.full((size,), action), torch.full((size,), 0.1)
        for name, given in (("log_prob", [actions]), ("sample", [noise])):
            outputs = torch.tensor(inputs, requires_grad=True)
            getattr(spec(outputs), name)(*given).sum().backward()
            found.append(outputs.grad)
        return found

    both, finite = gradients(spec, [0.9, 0.4, math.inf, 0.5], 2), gradients(SPEC, [0.4, 0.5], 1)
    for found, usual in zip(both, finite, strict=True):
        assert usual.abs().min() > 0
        torch.testing.assert_close(found[[1, 3]], usual)
        torch.testing.assert_close(found[[0, 2]], torch.zeros(2))


# A distribution of one's own: the example in DistributionSpec's docstring.


CUSTOM_DISTRIBUTION_BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)


@pytest.fixture(scope="module")
def laplace() -> Any:
    """The docstring's `laplace`."""
    doc = inspect.getdoc(DistributionSpec) or ""
    start, end = doc.index("    class Laplace("), doc.index("A run uses it with")
    names: dict[str, Any] = {
        "torch": torch,
        "ActionDistribution": ActionDistribution,
        "DistributionSpec": DistributionSpec,
    }
    exec(textwrap.dedent(doc[start:end]), names)
    return names["laplace"]


def test_noise_of_its_own_must_be_made_of_given_numbers_too(laplace: Any) -> None:
    spec = laplace(CUSTOM_DISTRIBUTION_BOX)
    assert torch.equal(spec.noise_from(torch.full((4, 2, 3), 0.25)), torch.full((4, 3), 0.25))
    own = type("Own", (type(spec),), {"draw_noise": lambda *_: torch.zeros(3)})(6, 3)
    with pytest.raises(NotImplementedError, match="Own has its own draw_noise"):
        own.noise_from(torch.zeros(4, 2, 3))


def test_it_may_be_a_part_of_a_composite_and_takes_no_mask(laplace: Any) -> None:
    parts = {"arm": laplace(CUSTOM_DISTRIBUTION_BOX), "grip": distribution_for(spaces.Discrete(2))}
    spec = CompositeSpec(parts)
    actions = spec(torch.zeros(4, spec.inputs_size)).sample(spec.draw_noise((4,)))
    assert actions["arm"].shape == (4, 3)
    assert actions["grip"].shape == (4,)
    with pytest.raises(ValueError, match="in 'arm', LaplaceSpec has no action mask"):
        spec.mask(torch.zeros(4, 8), {"arm": torch.ones(4, 3)})
