"""Action distributions against torch.distributions, and what sampling promises."""

from __future__ import annotations

import inspect
import math
import textwrap
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_modules import (
    DISCRETE,
    FLOATS,
    SHIFTED,
    SPACES,
    UNEVEN,
    drawn,
    inputs_for,
    references,
)
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
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
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.structures import space_leaves

MANY = 40_000
every_space = pytest.mark.parametrize("space", SPACES, ids=str)
DTYPES = {
    spaces.Discrete: torch.int64,
    spaces.MultiDiscrete: torch.int64,
    spaces.MultiBinary: torch.int8,
    spaces.Box: torch.float32,
}


def at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


@every_space
@pytest.mark.parametrize("leading", [(), (7,), (4, 6)])
def test_log_prob_and_entropy_are_those_of_torch_distributions(
    space: gymnasium.Space[Any], leading: tuple[int, ...]
) -> None:
    spec = distribution_for(space)
    inputs = inputs_for(spec, *leading)
    actions = drawn(spec, inputs)
    parts = references(space, inputs, actions)
    log_prob = sum(part.distribution.log_prob(part.actions) for part in parts)
    entropy = sum(part.distribution.entropy() for part in parts)
    torch.testing.assert_close(spec(inputs).log_prob(actions), log_prob)
    torch.testing.assert_close(spec(inputs).entropy(), entropy)


@every_space
def test_kl_is_that_of_torch_distributions(space: gymnasium.Space[Any]) -> None:
    spec = distribution_for(space)
    one, other = inputs_for(spec, 9, seed=1), inputs_for(spec, 9, seed=2)
    actions = drawn(spec, one)
    pairs = zip(references(space, one, actions), references(space, other, actions), strict=True)
    expected = sum(kl_divergence(p.distribution, q.distribution) for p, q in pairs)
    torch.testing.assert_close(spec(one).kl(spec(other)), expected)
    torch.testing.assert_close(spec(one).kl(spec(one)), torch.zeros(9), atol=1e-5, rtol=0)


@every_space
def test_samples_and_modes_have_the_shapes_and_dtypes_of_actions(
    space: gymnasium.Space[Any],
) -> None:
    spec = distribution_for(space)
    inputs = inputs_for(spec, 3, 4)
    for tree in (drawn(spec, inputs), spec(inputs).mode()):
        for path, leaf in space_leaves(space):
            actions = at(tree, path)
            assert actions.shape == (3, 4, *leaf.shape)
            assert actions.dtype == DTYPES[type(leaf)]


@every_space
def test_samples_come_as_often_as_torch_distributions_say(space: gymnasium.Space[Any]) -> None:
    spec = distribution_for(space)
    inputs = inputs_for(spec).expand(MANY, -1)
    actions = drawn(spec, inputs, seed=3)
    log_probs = spec(inputs).log_prob(actions)
    error = 5 * log_probs.std() / MANY**0.5  # five standard errors
    assert (spec(inputs[0]).entropy() + log_probs.mean()).abs() <= error + 1e-5
    for part in references(space, inputs, actions):
        if isinstance(part.distribution, Categorical):
            probabilities = part.distribution.probs[0]
            found = torch.bincount(part.actions, minlength=len(probabilities)) / MANY
            torch.testing.assert_close(found, probabilities, atol=0.015, rtol=0)
        else:
            mean, deviation = part.distribution.mean[0], part.distribution.stddev[0]
            torch.testing.assert_close(part.actions.mean(0), mean, atol=0.1, rtol=0)
            torch.testing.assert_close(part.actions.std(0), deviation, atol=0.02, rtol=0.02)


@every_space
def test_the_same_generator_state_draws_the_same_noise(space: gymnasium.Space[Any]) -> None:
    spec = distribution_for(space)
    draws = [spec.draw_noise((3, 4), torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert draws[0].shape == (3, 4, spec.noise_size)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_noise_is_finite_even_where_a_generator_says_zero() -> None:
    seed, size = 1233, 1 << 14
    assert not torch.rand(size, generator=torch.Generator().manual_seed(seed)).all()
    for space in (spaces.Discrete(1), spaces.MultiBinary(1)):
        generator = torch.Generator().manual_seed(seed)
        noise = distribution_for(space).draw_noise((size,), generator)
        assert noise.isfinite().all()
        assert noise.min() > -5


@every_space
def test_noise_from_uniform_numbers_is_that_which_is_drawn(space: gymnasium.Space[Any]) -> None:
    spec, generator = distribution_for(space), torch.Generator().manual_seed(3)
    drawn_here = spec.draw_noise((MANY,), generator)  # [B, M]
    given = spec.noise_from(torch.rand(MANY, 2, spec.noise_size, generator=generator))
    shares = torch.linspace(0.02, 0.98, 9)
    close = {"atol": 0.08, "rtol": 0.05}
    torch.testing.assert_close(given.quantile(shares, 0), drawn_here.quantile(shares, 0), **close)
    bounds = torch.tensor([0.0, 1.0]).view(2, 1, 1).expand(2, 2, spec.noise_size)
    assert spec.noise_from(bounds).isfinite().all()


def test_the_mode_is_the_likeliest_action() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 0.0, 0.0])
    assert distribution_for(DISCRETE)(logits).mode() == 1
    assert distribution_for(SHIFTED)(logits).mode() == -1
    gaussian = distribution_for(FLOATS)(torch.arange(12.0))
    assert torch.equal(gaussian.mode(), torch.arange(6.0).reshape(2, 3))
    uneven = distribution_for(UNEVEN)(torch.tensor([0.0, 1, 5, 6, 7, 4, 9, 2, 1, 0]))
    assert uneven.mode().tolist() == [1, 2, 0, 0]
    bits = distribution_for(spaces.MultiBinary(3))(torch.tensor([-1.0, 2.0, 0.1]))
    assert bits.mode().tolist() == [0, 1, 1]


@every_space
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_reckoned_with_in_single(
    space: gymnasium.Space[Any], dtype: torch.dtype
) -> None:
    spec = distribution_for(space)
    inputs = inputs_for(spec, 6).to(dtype)
    actions = drawn(spec, inputs)
    for half, single in (
        (spec(inputs).log_prob(actions), spec(inputs.float()).log_prob(actions)),
        (spec(inputs).entropy(), spec(inputs.float()).entropy()),
    ):
        assert torch.equal(half, single)


@every_space
@pytest.mark.parametrize("squash", [False, True])
def test_log_prob_entropy_and_kl_can_be_vmapped(space: gymnasium.Space[Any], squash: bool) -> None:
    spec = distribution_for(space, squash)
    one, other = inputs_for(spec, 3, 4, seed=1), inputs_for(spec, 3, 4, seed=2)
    actions = drawn(spec, one)

    def all_three(one: torch.Tensor, other: torch.Tensor, actions: Any) -> tuple[Any, ...]:
        policy = spec(one)
        return policy.log_prob(actions), policy.entropy(), policy.kl(spec(other))

    mapped = torch.func.vmap(all_three)(one, other, actions)
    for found, expected in zip(mapped, all_three(one, other, actions), strict=True):
        torch.testing.assert_close(found, expected)


@every_space
@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_gradients_are_finite(space: gymnasium.Space[Any], squash: bool, scale: float) -> None:
    spec = distribution_for(space, squash)
    inputs = (inputs_for(spec, 8, seed=1) * scale).requires_grad_()
    other = spec(inputs_for(spec, 8, seed=2))
    policy = spec(inputs)
    total = policy.log_prob(drawn(spec, inputs.detach())) + policy.entropy() + policy.kl(other)
    (gradient,) = torch.autograd.grad(total.sum(), inputs)
    assert gradient.isfinite().all()


def test_log_stds_are_found_among_the_outputs() -> None:
    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2,)), c=spaces.Box(-1, 1, (1,)))
    assert distribution_for(space).log_std_inputs == [5, 6, 8]
    assert distribution_for(DISCRETE).log_std_inputs == []


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("log_std", [torch.inf, -torch.inf, torch.nan])
def test_a_log_std_that_is_not_finite_never_passes_as_finite_and_is_named(
    log_std: float, squash: bool
) -> None:
    space = spaces.Dict(aim=spaces.Box(-1, 1, (2,), np.float32), fire=spaces.Discrete(2))
    spec = distribution_for(space, squash)
    inputs = torch.tensor([0.1, 0.2, 0.0, log_std, 0.0, 0.0])
    policy = spec(inputs.expand(100, -1))
    assert not policy.log_prob(drawn(spec, inputs.expand(100, -1))).isfinite().any()
    assert not policy.entropy().isfinite().any()
    why = spec.why_not_finite(inputs)
    assert why.startswith("in 'aim', the log standard deviation of element 1 of the action is ")
    assert f"{log_std:g}" in why


def test_outputs_that_are_not_finite_are_named() -> None:
    spec = distribution_for(spaces.Tuple((DISCRETE, SHIFTED)))
    inputs = torch.zeros(10)
    assert spec.why_not_finite(inputs) == ""
    inputs[7] = torch.nan
    assert spec.why_not_finite(inputs) == "in '1', output 2 of the policy is nan"
    assert not spec(inputs).log_prob(spec(inputs).mode()).isfinite()


@pytest.mark.parametrize(
    ("space", "why"),
    [
        (spaces.Box(0, 255, (3,), np.uint8), "make it a MultiDiscrete"),
        (spaces.Box(0, 1, (0,), np.float32), "no elements"),
        (spaces.MultiDiscrete(np.zeros(0, np.int64)), "no elements"),
        (spaces.Text(3), "strings"),
        (spaces.Sequence(DISCRETE), "pad them"),
    ],
    ids=str,
)
def test_an_action_space_that_nothing_serves_is_named(
    space: gymnasium.Space[Any], why: str
) -> None:
    for whole, where in ((space, ""), (spaces.Dict(a=spaces.Tuple((space,))), "a/0")):
        with pytest.raises(UnsupportedSpace, match=why) as caught:
            distribution_for(whole)
        assert str(space) in str(caught.value)
        assert where in str(caught.value)


# Action masks: what is illegal is never done, and what is legal is as if nothing else existed.


FEW = spaces.MultiDiscrete([2, 4, 3], start=[1, 0, -1])
NESTED = spaces.Dict(
    move=spaces.Discrete(3),
    aim=spaces.Box(-1, 1, (2,), np.float32),
    more=spaces.Tuple((FEW, spaces.Discrete(2))),
)


class Case(NamedTuple):
    logits: Tensor  # [n]
    others: Tensor  # [n]
    legal: Tensor  # [n], at least one


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    logits = st.lists(st.floats(-3e4, 3e4, width=16), min_size=n, max_size=n)
    legal = draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
    made = [torch.tensor(draw(logits), dtype=dtype) for _ in range(2)]
    return Case(made[0], made[1], torch.tensor(legal))


@given(cases(), st.sampled_from([torch.bool, torch.int8, torch.float32]))
def test_illegal_actions_have_no_probability_at_all(case: Case, mask_dtype: torch.dtype) -> None:
    spec = distribution_for(spaces.Discrete(len(case.logits)))
    masked = spec.mask(case.logits, case.legal.to(mask_dtype))
    assert masked.dtype == case.logits.dtype
    assert masked.isfinite().all()
    assert (masked.softmax(-1)[~case.legal] == 0).all()
    assert (spec(masked).log_probs.exp()[~case.legal] == 0).all()
    assert (spec(masked).probs[~case.legal] == 0).all()
    assert torch.equal(masked[case.legal], case.logits[case.legal])
    worst = torch.where(case.legal, -4.5, 17.0)  # the extremes that noise is drawn between
    assert case.legal[spec(masked).sample(worst)]
    assert case.legal[spec(masked).mode()]


@given(cases())
def test_legal_actions_are_distributed_as_if_there_were_no_others(case: Case) -> None:
    spec = distribution_for(spaces.Discrete(len(case.logits)))
    policy, other = (spec(spec.mask(x, case.legal)) for x in (case.logits, case.others))
    alone, other_alone = (
        x[case.legal].double().log_softmax(-1) for x in (case.logits, case.others)
    )
    first = case.legal.int().argmax()
    rounding = 1e-6 * (1 + float(torch.cat([case.logits, case.others]).float().abs().max()))
    for found, expected in (
        (policy.log_prob(first), alone[0]),
        (policy.entropy(), -(alone.exp() * alone).sum()),
        (policy.kl(other), (alone.exp() * (alone - other_alone)).sum()),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=rounding)
    logits = case.logits.float().requires_grad_()
    policy = spec(spec.mask(logits, case.legal))
    total = 1e6 * (policy.entropy() + policy.log_prob(policy.mode()) + policy.kl(other))
    (gradient,) = torch.autograd.grad(total, logits)
    assert gradient.isfinite().all()
    assert (gradient[~case.legal] == 0).all()


@given(st.lists(st.booleans(), min_size=9, max_size=9), st.integers(0, 100))
def test_a_flat_mask_reaches_each_choice_of_a_multi_discrete_space(
    bits: list[bool], seed: int
) -> None:
    splits = [bits[:2], bits[2:6], bits[6:]]
    for choice in splits:
        choice[0] |= not any(choice)  # something is legal
    mask = torch.tensor([bit for choice in splits for bit in choice])
    spec = distribution_for(FEW)
    inputs = inputs_for(spec, 20, seed=seed)
    policy = spec(spec.mask(inputs, mask.expand(20, -1)))
    expected = torch.zeros(20)
    for part, choice in zip(inputs.split([2, 4, 3], -1), splits, strict=True):
        expected = expected + Categorical(logits=part[:, choice]).entropy()
    torch.testing.assert_close(policy.entropy(), expected, rtol=1e-4, atol=1e-5)
    noise = spec.draw_noise((20,), torch.Generator().manual_seed(seed))
    for actions in (policy.sample(noise), policy.mode()):
        for i, choice in enumerate(splits):
            assert all(choice[a] for a in (actions[:, i] - int(FEW.start[i])).tolist())


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_a_masked_bit_stays_zero(shape: tuple[int, ...]) -> None:
    space = spaces.MultiBinary(shape)
    spec = distribution_for(space)
    inputs = torch.full((50, spec.inputs_size), 30.0, requires_grad=True)
    mask = torch.ones(50, *shape, dtype=torch.int8)
    mask[:, 0] = 0
    masked = spec.mask(inputs, mask.flatten(1))
    assert torch.equal(masked, spec.mask(inputs, mask))  # in the shape of the space as well
    policy = spec(masked)
    assert not policy.mode()[:, 0].any()
    actions = policy.sample(torch.full((50, spec.noise_size), torch.finfo(torch.float32).tiny))
    assert torch.equal(actions, mask)
    total = policy.entropy() + policy.kl(policy) + policy.log_prob(actions)
    assert total.isfinite().all()
    (gradient,) = torch.autograd.grad(total.sum(), inputs)
    assert gradient.isfinite().all()
    torch.testing.assert_close(policy.entropy(), torch.zeros(50), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("space", "mask", "message"),
    [
        (spaces.Discrete(3), torch.ones(4, 2), r"is \[4, 2\], not \[4, 3\].* of"),
        (spaces.Discrete(3), torch.ones(3), r"is \[3\], not \[4, 3\]"),
        (spaces.Discrete(3), {"a": torch.ones(4, 3)}, r"is a dict, not \[4, 3\]"),
        (FEW, torch.ones(4, 3), r"is \[4, 3\], not \[4, 9\].* of"),
        (spaces.MultiBinary(2), torch.ones(4, 4), r"is \[4, 4\], not \[4, 2\].* of the 2 bits"),
        (spaces.Box(-1, 1, (2,)), torch.ones(4, 2), "GaussianSpec has no action mask"),
        (NESTED, {"moev": torch.ones(4, 3)}, "key 'moev'.* did you mean 'move'"),
        (NESTED, {"x": torch.ones(4, 3)}, r"key 'x'.* known are aim, more, move"),
        (NESTED, torch.ones(4, 3), "is a Tensor, not a map with keys"),
        (NESTED, {"more": {"1": torch.ones(4, 3)}}, "in 'more', in '1', the action"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_with_what_would_fit(
    space: gymnasium.Space[Any], mask: Any, message: str
) -> None:
    spec = distribution_for(space)
    with pytest.raises(ValueError, match=message):
        spec.mask(inputs_for(spec, 4), mask)


# Gaussians squashed to the bounds of a Box.


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
        for name, arguments in (("log_prob", [actions]), ("sample", [noise])):
            outputs = torch.tensor(inputs, requires_grad=True)
            getattr(spec(outputs), name)(*arguments).sum().backward()
            found.append(outputs.grad)
        return found

    both, finite = gradients(spec, [0.9, 0.4, math.inf, 0.5], 2), gradients(SPEC, [0.4, 0.5], 1)
    for found, usual in zip(both, finite, strict=True):
        assert usual.abs().min() > 0
        torch.testing.assert_close(found[[1, 3]], usual)
        torch.testing.assert_close(found[[0, 2]], torch.zeros(2))


# A distribution of one's own: the example in DistributionSpec's docstring.


ANY_BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)


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
    spec = laplace(ANY_BOX)
    assert torch.equal(spec.noise_from(torch.full((4, 2, 3), 0.25)), torch.full((4, 3), 0.25))
    own = type("Own", (type(spec),), {"draw_noise": lambda *_: torch.zeros(3)})(6, 3)
    with pytest.raises(NotImplementedError, match="Own has its own draw_noise"):
        own.noise_from(torch.zeros(4, 2, 3))


def test_it_may_be_a_part_of_a_composite_and_takes_no_mask(laplace: Any) -> None:
    parts = {"arm": laplace(ANY_BOX), "grip": distribution_for(spaces.Discrete(2))}
    spec = CompositeSpec(parts)
    actions = spec(torch.zeros(4, spec.inputs_size)).sample(spec.draw_noise((4,)))
    assert actions["arm"].shape == (4, 3)
    assert actions["grip"].shape == (4,)
    with pytest.raises(ValueError, match="in 'arm', LaplaceSpec has no action mask"):
        spec.mask(torch.zeros(4, 8), {"arm": torch.ones(4, 3)})
