"""Several optimizers in one module, beside those of torch; and three ways to clip."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.states import copied
from torch import Tensor

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.core.state import StateMismatch
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
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
    restored = Learner(make_core(optimizers={"value": VALUE}), seed=9)
    restored.restore(tree, extras)
    for seed in (7, 8):
        batch = make_batch(seed=seed)
        expected = fetch_metrics(learner.update_from_episodes([batch]))
        assert fetch_metrics(restored.update_from_episodes([batch])) == expected
    saved = [each.save()[0]["default"]["parameters"] for each in (learner, restored)]
    for name, array in saved[0].items():
        np.testing.assert_array_equal(array, saved[1][name])
    with pytest.raises(StateMismatch, match="'moments/mean' is in the checkpoint, and not"):
        Learner(make_core(optimizer="rmsprop")).restore(tree, extras)


def test_a_value_function_that_learns_faster_is_one_with_such_an_optimizer(
    make_batch: MakeBatch,
) -> None:
    """The schedule is the run's, and patterns that name something of it go before."""
    lr = [[0, 1e-3], [36, 0.0]]
    table = {"parameters": ["value_encoder*", "value_head*"], "lr": [[0, 3e-3], [36, 0.0]]}
    bias = {"parameters": ["value_head.bias"], "lr": 1e-2}
    apart = {"value": {**table, "parameters": ["value_encoder*", "value_head.weight"]}}
    for scaled, named in (
        (make_core(lr=lr, value_lr_scale=3.0), make_core(lr=lr, optimizers={"value": table})),
        (
            make_core(lr=lr, value_lr_scale=3.0, optimizers={"bias": bias}),
            make_core(lr=lr, optimizers={**apart, "bias": bias}),
        ),
    ):
        one, other = scaled.init(0), named.init(0)
        for seed in range(3):
            sample = collate([make_batch(3, 6, ends=0.0, seed=seed)])
            one, other = scaled.step(one, sample).state, named.step(other, sample).state
        expected = flat(named, other)
        for name, x in flat(scaled, one).items():
            torch.testing.assert_close(x, expected[name], rtol=1e-6, atol=1e-8)


def test_only_the_head_learns_faster_where_the_layers_are_shared(make_batch: MakeBatch) -> None:
    shared = partial(
        build_module,
        None,
        VECTOR,
        spaces.Discrete(2),
        {"hidden_sizes": [8], "shared_value_layers": True},
    )
    sample = collate([make_batch()])
    cores = [make_core(shared, grad_clip=None, value_lr_scale=x) for x in (1.0, 5.0)]
    before = flat(cores[0], cores[0].init(0))
    plain, fast = (flat(core, core.step(core.init(0), sample).state) for core in cores)
    for name, x in plain.items():
        times = 5.0 if name.startswith("value_head") else 1.0
        torch.testing.assert_close(fast[name] - before[name], times * (x - before[name]))


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"value": {"parameters": ["valeu_head*"]}},
            r"optimizers.value: no parameter has a name like 'valeu_head\*'; there are .*, value_h",
        ),
        (
            {"a": {"parameters": ["value*"]}, "b": {"parameters": ["*head.bias"]}},
            "optimizers.a and optimizers.b both name 'value_head.bias'",
        ),
        ({"a": {"parameter": ["x"]}}, "optimizers.a has no key 'parameter': did you mean 'param"),
        ({"a": {"parameters": ["x"], "batch_size": 3}}, "optimizers.a has no key 'batch_size': kn"),
        ({"a": {"parameters": []}}, "optimizers.a needs parameters = "),
        ({"a": {"parameters": "x"}}, "optimizers.a needs parameters = "),
        ({"a": {"lr": 1.0}}, "optimizers.a needs parameters = "),
        ({"a b": {"parameters": ["x"]}}, "optimizers.a b: a name is made of"),
        ({"a": 3}, "optimizers.a = 3: expected a table"),
        ({"a": {"parameters": ["x"], "lr": 0.0}}, "optimizers.a.lr = 0.0: must be above 0"),
        (
            {"a": {"parameters": ["x"], "lr": "x"}},
            "optimizers.a.lr: expected a number, or a schedule",
        ),
        (
            {"a": {"parameters": ["x"], "optimizer": "admm"}},
            "optimizers.a.optimizer = 'admm' is not known: did you mean 'adam'",
        ),
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
