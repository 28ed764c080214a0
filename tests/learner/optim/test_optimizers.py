"""Optimizers against torch.optim."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import VECTOR, MakeBatch
from support.small_cores import copied
from torch import Tensor

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.state_trees import StateMismatch
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.learner.optim.optimizers import (
    Adam,
    Optimizer,
    RMSProp,
    Schedule,
    Step,
    clip_by_global_norm,
)
from juggler.runtime.modules.module_specs import build_module

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
        (RMSProp(decay=0.9, epsilon=0.1), partial(rmsprop, alpha=0.9, eps=0.1)),
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


# Schedules follow their points.


@pytest.mark.parametrize(
    ("steps", "value"), [(0, 1.0), (10, 1.0), (15, 0.75), (20, 0.5), (60, 0.25), (1000, 0.0)]
)
def test_a_schedule_is_linear_between_its_points_and_constant_beyond(
    steps: int, value: float
) -> None:
    schedule = Schedule([(10, 1.0), (20, 0.5), (100, 0.0)])
    assert schedule(torch.tensor(steps)).item() == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("points", [[], [(10, 1.0), (10, 2.0)], [(10, 1.0), (5, 2.0)]])
def test_a_schedule_whose_steps_do_not_rise_is_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="pairs by rising step"):
        Schedule(points)


# Several optimizers in one module, beside those of torch; and three ways to clip.


VALUE = {"parameters": ["value*"], "lr": 1e-2, "optimizer": "rmsprop", "optimizer_epsilon": 0.1}
make = partial(build_module, None, VECTOR, spaces.Discrete(2), {"hidden_sizes": [8]})


def make_core(make_module: Any = None, **config: Any) -> Impala:
    return Impala(make_module or make, ImpalaConfig(**config))


def flat(core: Impala, state: Any) -> dict[str, Tensor]:
    return core.flat.named(state["parameters"])


def test_two_optimizers_are_those_of_torch_bit_for_bit(make_batch: MakeBatch) -> None:
    core = make_core(lr=1e-3, grad_clip=0.5, optimizers={"value": {**VALUE, "grad_clip": "none"}})
    state = core.init(seed=0)
    reference = {name: x.clone().requires_grad_() for name, x in flat(core, state).items()}
    value = [x for name, x in reference.items() if name.startswith("value")]
    # In one vector, as ours are: to the bit, it matters where numbers lie.
    rest = [name for name in reference if not name.startswith("value")]
    flat_rest = torch.cat([reference[name].detach().flatten() for name in rest]).requires_grad_()
    assert len(value) > 1
    theirs = [
        torch.optim.Adam([flat_rest], lr=1e-3, eps=1e-5, fused=True),
        torch.optim.RMSprop(value, lr=1e-2, eps=0.1, foreach=False),
    ]
    for seed in range(20):
        sample = collate([make_batch(seed=seed)])
        grads, aux = core.grads(state, sample)
        for name, gradient in core.flat.named(grads).items():
            reference[name].grad = gradient.clone()
        whole = torch.cat([reference[name].grad.flatten() for name in rest])
        scale = (0.5 / (torch.linalg.vector_norm(whole) + 1e-6)).clamp(max=1.0)
        flat_rest.grad = whole * scale
        for each in theirs:
            each.step()
        pieces = torch.split(flat_rest.detach(), [reference[name].numel() for name in rest])
        for name, piece in zip(rest, pieces, strict=True):
            reference[name] = piece.view(reference[name].shape)
        state = core.apply(state, grads, aux).state
        for name, x in flat(core, state).items():
            assert torch.equal(x, reference[name].detach()), name


def test_each_has_a_schedule_and_a_metric_of_its_own(make_batch: MakeBatch) -> None:
    core = make_core(
        lr=1e-3,
        optimizers={
            "value": {"parameters": ["value*"], "lr": [[0, 1e-2], [36, 0.0]]},
            "bias": {"parameters": ["policy*.bias"], "optimizer": "rmsprop"},
        },
    )
    batch = make_batch(3, 6, ends=0.0)
    sample = collate([batch])
    output = core.step(core.init(0), sample)
    first = fetch_metrics(output.metrics)
    second = fetch_metrics(core.step(copied(output.state), sample).metrics)
    assert (first["lr"], first["lr_value"]) == (1e-3, 1e-2)
    assert (second["lr"], second["lr_value"]) == pytest.approx((1e-3, 5e-3))
    assert "lr_bias" not in first  # it has none of its own
    before = core.step(copied(output.state), sample).state
    after = core.step(copied(before), sample).state
    for name, x in flat(core, after).items():
        assert torch.equal(x, flat(core, before)[name]) == name.startswith("value"), name


def test_a_checkpoint_goes_on_with_the_same_numbers_and_knows_other_optimizers(
    make_batch: MakeBatch,
) -> None:
    learner = Learner(make_core(optimizers={"value": VALUE}), seed=0)
    for seed in range(3):
        learner.update_from_episodes([make_batch(seed=seed)])
    tree: Any
    tree, extras = learner.save()
    assert tree["default"]["moments"].keys() == {"mean", "mean_square", "updates"}
    del tree["default"]["buffers"]  # empty: a file of arrays does not keep it
    restored = Learner(make_core(optimizers={"value": VALUE}), seed=9)
    restored.restore(tree, extras)
    for seed in (7, 8):
        batch = make_batch(seed=seed)
        expected = fetch_metrics(learner.update_from_episodes([batch]))
        assert fetch_metrics(restored.update_from_episodes([batch])) == expected
    saved = [each.save()[0]["default"]["parameters"] for each in (learner, restored)]
    for name, array in saved[0].items():
        np.testing.assert_array_equal(array, saved[1][name])
    with pytest.raises(StateMismatch, match="'moments/mean' is in the"):
        Learner(make_core(optimizer="rmsprop")).restore(tree, extras)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"value": {"parameters": ["valeu_head*"]}}, "optimizers.value: no parameter"),
        (
            {"a": {"parameters": ["value*"]}, "b": {"parameters": ["*head.bias"]}},
            "optimizers.a and optimizers.b",
        ),
        ({"a": {"parameter": ["x"]}}, "optimizers.a has no key"),
        ({"a": {"parameters": ["x"], "batch_size": 3}}, "optimizers.a has no key 'batch_size': kn"),
        ({"a": {"parameters": []}}, "optimizers.a needs parameters = "),
        ({"a": {"parameters": "x"}}, "optimizers.a needs parameters = "),
        ({"a": {"lr": 1.0}}, "optimizers.a needs parameters = "),
        ({"a b": {"parameters": ["x"]}}, "optimizers.a b: a name is made of"),
        ({"a": 3}, "optimizers.a = 3: expected a table"),
        ({"a": {"parameters": ["x"], "lr": 0.0}}, "optimizers.a.lr = 0.0: must be above 0"),
        ({"a": {"parameters": ["x"], "lr": "x"}}, "optimizers.a.lr: expected a"),
        ({"a": {"parameters": ["x"], "optimizer": "admm"}}, "optimizers.a.optimizer = 'admm'"),
    ],
)
def test_a_table_that_cannot_be_says_where_and_what_is_near(
    tables: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_core(optimizers=tables)


@pytest.mark.parametrize("by", ["global_norm", "norm", "value"])
def test_gradients_are_clipped_as_torch_does(make_batch: MakeBatch, by: str) -> None:
    core = make_core(grad_clip=0.02, grad_clip_by=by, optimizer="rmsprop", lr=1.0)
    state = core.init(seed=0)
    grads, aux = core.grads(state, collate([make_batch()]))
    output = core.apply(copied(state), grads, aux)
    parameters = []
    for gradient in core.flat.named(grads).values():
        parameters.append(torch.zeros_like(gradient, requires_grad=True))
        parameters[-1].grad = gradient.clone()
    if by == "global_norm":
        torch.nn.utils.clip_grad_norm_(parameters, 0.02)
    elif by == "value":
        torch.nn.utils.clip_grad_value_(parameters, 0.02)
    else:
        for each in parameters:
            torch.nn.utils.clip_grad_norm_([each], 0.02)
    expected = torch.cat([0.01 * each.grad.flatten().square() for each in parameters])
    torch.testing.assert_close(output.state["moments"]["mean_square"], expected)
    assert output.metrics["grad_norm"] == torch.linalg.vector_norm(grads)


@pytest.mark.parametrize("by", ["global_norm", "norm", "value"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped_however_it_is_clipped(
    make_batch: MakeBatch, by: str, wrong: float
) -> None:
    core = make_core(grad_clip=0.5, grad_clip_by=by, optimizers={"value": VALUE})
    state = core.init(seed=0)
    grads, aux = core.grads(state, collate([make_batch()]))
    grads[3] = wrong
    output = core.apply(copied(state), grads, aux)
    assert output.metrics["skipped"] == 1
    assert torch.equal(output.state["parameters"], state["parameters"])
    for name, moment in output.state["moments"].items():
        assert torch.equal(moment, state["moments"][name])


def test_only_the_head_learns_faster_where_the_layers_are_shared(make_batch: MakeBatch) -> None:
    model = {"hidden_sizes": [8], "shared_value_layers": True}
    shared = partial(build_module, None, VECTOR, spaces.Discrete(2), model)
    sample = collate([make_batch()])
    cores = [make_core(shared, grad_clip=None, value_lr_scale=x) for x in (1.0, 5.0)]
    before = flat(cores[0], cores[0].init(0))
    plain, fast = (flat(core, core.step(core.init(0), sample).state) for core in cores)
    for name, x in plain.items():
        times = 5.0 if name.startswith("value_head") else 1.0
        torch.testing.assert_close(fast[name] - before[name], times * (x - before[name]))
