"""Action distributions against torch.distributions, and what sampling promises."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.distribution_references import (
    DISCRETE,
    FLOATS,
    SHIFTED,
    SPACES,
    UNEVEN,
    drawn,
    inputs_for,
    references,
)
from torch.distributions import Categorical, kl_divergence

from juggler.runtime.modules.distributions import distribution_for
from juggler.runtime.modules.errors import UnsupportedSpace
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


def test_kl_between_different_kinds_is_refused() -> None:
    box = spaces.Box(-1, 1, (), np.float32)
    kinds = [
        distribution_for(DISCRETE)(torch.zeros(5)),
        distribution_for(box)(torch.zeros(2)),
        distribution_for(box, squash=True)(torch.zeros(2)),
        distribution_for(spaces.Dict(a=DISCRETE))(torch.zeros(5)),
        distribution_for(spaces.Dict(b=DISCRETE))(torch.zeros(5)),
    ]
    for i, one in enumerate(kinds):
        for other in kinds[:i] + kinds[i + 1 :]:
            with pytest.raises(TypeError, match="not defined"):
                one.kl(other)


@every_space
def test_samples_modes_and_zeros_have_the_shapes_and_dtypes_of_actions(
    space: gymnasium.Space[Any],
) -> None:
    spec = distribution_for(space)
    inputs = inputs_for(spec, 3, 4)
    for tree in (drawn(spec, inputs), spec(inputs).mode(), spec.zeros((3, 4))):
        for path, leaf in space_leaves(space):
            actions = at(tree, path)
            assert actions.shape == (3, 4, *leaf.shape)
            assert actions.dtype == DTYPES[type(leaf)]


@every_space
def test_whole_actions_are_those_of_the_space(space: gymnasium.Space[Any]) -> None:
    spec = distribution_for(space)
    inputs = inputs_for(spec, 50)
    for tree in (drawn(spec, inputs), spec(inputs).mode()):
        for path, leaf in space_leaves(space):
            if not isinstance(leaf, spaces.Box):
                assert all(leaf.contains(action) for action in at(tree, path).numpy())


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


def test_the_parts_of_an_action_are_sampled_independently() -> None:
    spec = distribution_for(spaces.Tuple((spaces.MultiDiscrete([2, 2]), spaces.Discrete(2))))
    actions = drawn(spec, torch.zeros(MANY, spec.inputs_size))
    bits = torch.cat([actions["0"], actions["1"].unsqueeze(-1)], -1)
    found = torch.bincount(bits @ torch.tensor([4, 2, 1]), minlength=8) / MANY
    torch.testing.assert_close(found, torch.full((8,), 1 / 8), atol=0.01, rtol=0)


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


@pytest.mark.parametrize("space", [DISCRETE, UNEVEN, spaces.MultiBinary(3)], ids=str)
def test_gradients_of_choices_that_are_all_but_certain_are_finite(
    space: gymnasium.Space[Any],
) -> None:
    spec = distribution_for(space)
    inputs = (inputs_for(spec, 8) * 1e4).requires_grad_()
    policy = spec(inputs)
    total = policy.log_prob(policy.mode()) + policy.entropy() + policy.kl(spec(-inputs.detach()))
    (gradient,) = torch.autograd.grad(total.sum(), inputs)
    assert gradient.isfinite().all()


@every_space
def test_a_spec_that_first_acted_can_train(space: gymnasium.Space[Any]) -> None:
    with torch.inference_mode():
        spec = distribution_for(space, squash=True)
        drawn(spec, inputs_for(spec, 2))
    inputs = inputs_for(spec, 2).requires_grad_()
    policy = spec(inputs)
    (policy.log_prob(drawn(spec, inputs.detach())) + policy.entropy()).sum().backward()


@every_space
def test_specs_can_be_copied_and_sent_to_another_process(space: gymnasium.Space[Any]) -> None:
    spec = distribution_for(space, squash=True)
    inputs = inputs_for(spec, 2)
    expected = spec(inputs).entropy()
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):  # noqa: S301
        assert torch.equal(other(inputs).entropy(), expected)


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
