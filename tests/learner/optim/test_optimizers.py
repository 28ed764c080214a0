"""Optimizers against torch.optim."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from juggler.learner.optim.optimizers import (
    Adam,
    Optimizer,
    RMSProp,
    Step,
    clip_by_global_norm,
)

ALL = torch.tensor(True)


def rmsprop(parameters, *, fused: bool, **settings) -> torch.optim.RMSprop:
    """That of torch, which has no fused form."""
    return torch.optim.RMSprop(parameters, **settings)


@pytest.mark.parametrize("lr", [1e-3, 0.3])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Adam(), torch.optim.Adam),
        (
            Adam(betas=(0.5, 0.9), epsilon=1e-5),
            partial(torch.optim.Adam, betas=(0.5, 0.9), eps=1e-5),
        ),
        (RMSProp(), rmsprop),
        (
            RMSProp(decay=0.9, epsilon=0.1),
            partial(rmsprop, alpha=0.9, eps=0.1),
        ),
    ],
    ids=["adam", "adam with other settings", "rmsprop", "rmsprop with other settings"],
)
def test_fifty_steps_agree_with_torch_bit_for_bit(
    ours: Optimizer, theirs, fused: bool, lr: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = torch.randn(1000, generator=generator)
    reference = parameters.clone().requires_grad_()
    fused = fused and isinstance(ours, Adam)  # there is none of RMSProp
    optimizer = theirs([reference], lr=lr, foreach=False, fused=fused)
    moments = ours.init(parameters)
    for _ in range(50):
        gradient = torch.randn(1000, generator=generator) * 10 ** torch.randn(
            1000, generator=generator
        )
        step = Step(torch.tensor(lr, dtype=torch.float64), ALL, [1000], fused)
        parameters, moments = ours.update(parameters, gradient, moments, step)
        reference.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(parameters, reference.detach())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ours", [Adam(), RMSProp()])
def test_a_step_that_moves_nothing_leaves_parameters_and_moments_as_they_were(
    ours: Optimizer, in_place: bool
) -> None:
    parameters, lr = torch.arange(3.0), torch.tensor(0.1)
    moments = ours.init(parameters)
    step = Step(lr, ALL, [3], in_place)
    _, moments = ours.update(parameters, torch.ones(3), moments, step)
    before, step = {name: x.clone() for name, x in moments.items()}, step._replace(moved=~ALL)
    for wrong in (float("nan"), float("inf"), 1.0):
        own = parameters.clone()
        after, kept = ours.update(own, torch.full((3,), wrong), moments, step)
        assert torch.equal(after, parameters)
        assert all(torch.equal(kept[name], before[name]) for name in before)


def test_an_update_leaves_the_old_values_alone_unless_it_may_change_them() -> None:
    for optimizer in (Adam(), RMSProp()):
        parameters, gradient = torch.ones(3), torch.ones(3)
        moments = optimizer.init(parameters)
        before = {name: moment.clone() for name, moment in moments.items()}
        optimizer.update(parameters, gradient, moments, Step(torch.tensor(0.1), ALL, [3]))
        assert torch.equal(parameters, torch.ones(3))
        assert all(torch.equal(moments[name], before[name]) for name in before)


@pytest.mark.parametrize("in_place", [False, True])
def test_parameters_that_move_apart_do_as_if_each_had_an_adam_of_its_own(in_place: bool) -> None:
    sizes, generator = [70, 1, 33, 40], torch.Generator().manual_seed(0)
    parameters = torch.randn(sum(sizes), generator=generator)
    apart = [x.clone() for x in parameters.split(sizes)]
    moments, own = Adam().init(parameters), [Adam().init(x) for x in apart]
    moments["updates"] = torch.zeros_like(parameters)  # one count for each element
    lr = torch.tensor(0.01, dtype=torch.float64)
    for moved in torch.rand((20, len(sizes)), generator=generator) > 0.5:
        gradient = torch.randn(sum(sizes), generator=generator)
        step = Step(lr, moved, sizes, in_place)
        parameters, moments = Adam().update(parameters, gradient, moments, step)
        for place, each in enumerate(gradient.split(sizes)):
            alone = Step(lr, moved[place], sizes[place : place + 1])
            apart[place], own[place] = Adam().update(apart[place], each, own[place], alone)
    torch.testing.assert_close(parameters, torch.cat(apart), rtol=1e-5, atol=1e-6)
    for place, counts in enumerate(moments["updates"].split(sizes)):
        assert (counts == own[place]["updates"]).all()
        assert 0 < int(counts[0]) < 20


@pytest.mark.parametrize("limit", [0.5, 5.0, 50.0])
def test_clipping_is_that_of_torch(limit: float) -> None:
    gradient = torch.arange(4.0)  # norm √14 = 3.74
    parameter = torch.zeros(4, requires_grad=True)
    parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], limit)
    torch.testing.assert_close(clip_by_global_norm(gradient, norm, limit), parameter.grad)
