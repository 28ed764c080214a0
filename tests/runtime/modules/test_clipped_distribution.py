"""Gaussians around squashed means, clipped to the bounds of a Box."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.distribution_references import drawn, inputs_for

from juggler.runtime.modules.distributions import ClippedGaussian, ClippedGaussianSpec
from juggler.runtime.modules.numpy_pass import array_distribution

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


@pytest.mark.parametrize("inputs", INPUTS)
def test_entropy_is_that_of_masses_and_density(inputs: list[float]) -> None:
    below, above, points, densities = parts(inputs)
    masses = sum(x * math.log(x) for x in (below, above))
    expected = -masses - np.trapezoid(densities * np.log(densities), points)
    assert float(of(inputs).entropy()) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("one", INPUTS)
@pytest.mark.parametrize("other", INPUTS[:3])
def test_kl_is_that_of_masses_and_densities(one: list[float], other: list[float]) -> None:
    below, above, points, densities = parts(one)
    their_below, their_above, _, theirs = parts(other)
    expected = below * math.log(below / their_below) + above * math.log(above / their_above)
    expected += float(np.trapezoid(densities * np.log(densities / theirs), points))
    assert float(of(one).kl(of(other))) == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_log_prob_entropy_and_kl_are_finite_whatever_the_outputs() -> None:
    inputs = inputs_for(SPEC, 1000) * torch.tensor([20.0, 4.0])
    actions = drawn(SPEC, inputs)
    distribution, other = SPEC(inputs), SPEC(inputs.flip(0).clamp(-3, 3))
    assert distribution.log_prob(actions).isfinite().all()
    assert distribution.entropy().isfinite().all()
    assert other.kl(SPEC(inputs.clamp(-3, 3))).isfinite().all()
    low, high = float(LOW[0]), float(HIGH[0])
    assert ((actions >= low) & (actions <= high)).all()


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
    assert float(exact.entropy()) == pytest.approx(math.log(7))
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
        """Those of log-probabilities, entropy and actions by the outputs."""
        found = []
        actions, noise = torch.full((size,), action), torch.full((size,), 0.1)
        for name, given in (("log_prob", [actions]), ("entropy", []), ("sample", [noise])):
            outputs = torch.tensor(inputs, requires_grad=True)
            getattr(spec(outputs), name)(*given).sum().backward()
            found.append(outputs.grad)
        return found

    both, finite = gradients(spec, [0.9, 0.4, math.inf, 0.5], 2), gradients(SPEC, [0.4, 0.5], 1)
    for found, usual in zip(both, finite, strict=True):
        assert usual.abs().min() > 0
        torch.testing.assert_close(found[[1, 3]], usual)
        torch.testing.assert_close(found[[0, 2]], torch.zeros(2))


def test_kl_is_not_known_of_uniform_actions() -> None:
    one, other = of([0.9, math.inf]), of([0.4, 0.5])
    for kl in (one.kl(other), other.kl(one), one.kl(one)):
        assert kl.isnan()


def test_numpy_draws_the_uniform_actions_of_torch() -> None:
    spec = ClippedGaussianSpec(np.array([[-2.0], [0.0]]), np.array([[5.0], [1.0]]))
    noise = spec.draw_noise((8, 3), torch.Generator().manual_seed(0))  # [8, 3, 2]
    inputs = torch.randn((8, 3, 4), generator=torch.Generator().manual_seed(1))
    inputs[4:, :, 2:] = math.inf
    on_arrays = array_distribution(spec)
    found = on_arrays.sample(inputs.numpy(), noise.numpy())
    np.testing.assert_allclose(found, spec(inputs).sample(noise).numpy(), rtol=1e-5, atol=1e-5)
    assert found.shape == (8, 3, 2, 1)
    np.testing.assert_allclose(on_arrays.mode(inputs.numpy()), spec(inputs).mode(), atol=1e-5)
