"""Action masks: what is illegal is never done, and what is legal is as if nothing else existed."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from support.distribution_references import drawn, inputs_for
from torch import Tensor
from torch.distributions import Categorical

from juggler.runtime.modules.distributions import distribution_for

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


@given(cases())
def test_gradients_under_a_mask_are_finite_and_none_reaches_illegal_logits(case: Case) -> None:
    spec = distribution_for(spaces.Discrete(len(case.logits)))
    logits = case.logits.float().requires_grad_()
    policy = spec(spec.mask(logits, case.legal))
    other = spec(spec.mask(case.others.float(), case.legal))
    total = 1e6 * (policy.entropy() + policy.log_prob(policy.mode()) + policy.kl(other))
    (gradient,) = torch.autograd.grad(total, logits)
    assert gradient.isfinite().all()
    assert (gradient[~case.legal] == 0).all()


@given(cases())
def test_no_noise_and_no_mode_makes_an_illegal_action(case: Case) -> None:
    spec = distribution_for(spaces.Discrete(len(case.logits)))
    policy = spec(spec.mask(case.logits, case.legal))
    worst = torch.where(case.legal, -4.5, 17.0)  # the extremes that noise is drawn between
    assert case.legal[policy.sample(worst)]
    assert case.legal[policy.mode()]


def test_masked_samples_come_as_often_as_the_legal_ones_alone() -> None:
    spec = distribution_for(spaces.Discrete(4, start=3))
    logits = torch.tensor([5.0, 0.0, 1.0, 9.0])
    mask = torch.tensor([0, 1, 1, 0], dtype=torch.int8)
    many = 40_000
    actions = drawn(spec, spec.mask(logits, mask).expand(many, -1)) - 3
    found = torch.bincount(actions, minlength=4) / many
    expected = torch.tensor([0.0, *torch.tensor([0.0, 1.0]).softmax(-1), 0.0])
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)


def test_nothing_legal_leaves_all_finite() -> None:
    spec = distribution_for(spaces.Discrete(4))
    policy = spec(spec.mask(torch.randn(2, 4), torch.zeros(2, 4)))
    assert policy.entropy().isfinite().all()
    assert policy.log_prob(torch.tensor([0, 3])).isfinite().all()


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


def test_a_mask_of_parts_leaves_alone_what_it_does_not_name() -> None:
    spec = distribution_for(NESTED)
    inputs = inputs_for(spec, 5)
    mask = {
        "move": torch.tensor([1, 0, 1]).expand(5, -1),
        "more": {"1": torch.tensor([0, 1]).expand(5, -1)},
    }
    changed = (spec.mask(inputs, mask) != inputs).any(0)
    found = distribution_for(NESTED)(spec.mask(inputs, mask))
    assert changed.sum() == 2
    assert (found.mode()["move"] != 1).all()
    assert (found.mode()["more"]["1"] == 1).all()
    assert torch.equal(spec.mask(inputs, {}), inputs)


@pytest.mark.parametrize(
    ("space", "mask", "message"),
    [
        (spaces.Discrete(3), torch.ones(4, 2), r"is \[4, 2\], not \[4, 3\].* of the 3 actions"),
        (spaces.Discrete(3), torch.ones(3), r"is \[3\], not \[4, 3\]"),
        (spaces.Discrete(3), {"a": torch.ones(4, 3)}, r"is a dict, not \[4, 3\]"),
        (FEW, torch.ones(4, 3), r"is \[4, 3\], not \[4, 9\].* of the 9 options, those of one"),
        (spaces.MultiBinary(2), torch.ones(4, 4), r"is \[4, 4\], not \[4, 2\].* of the 2 bits"),
        (spaces.Box(-1, 1, (2,)), torch.ones(4, 2), "GaussianSpec takes no action mask"),
        (NESTED, {"moev": torch.ones(4, 3)}, "key 'moev'.* did you mean 'move'"),
        (NESTED, {"x": torch.ones(4, 3)}, r"key 'x'.* known are aim, more, move"),
        (NESTED, torch.ones(4, 3), r"is a Tensor, not a map with keys out of \['move', 'aim'"),
        (
            NESTED,
            {"more": {"1": torch.ones(4, 3)}},
            r"in 'more', in '1', the action mask is \[4, 3\], not \[4, 2\]",
        ),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_with_what_would_fit(
    space: gymnasium.Space[Any], mask: Any, message: str
) -> None:
    spec = distribution_for(space)
    with pytest.raises(ValueError, match=message):
        spec.mask(inputs_for(spec, 4), mask)
