"""TorchScript's interpreter makes recorded operations as they were made, whatever they read."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.algorithms import needs_memory
from support.cores import MakeBatch, make_core, samples_of
from torch import Tensor

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.learner import Learner
from juggler.runtime import recorder
from juggler.runtime.recorder import Recordings

_LIBRARY = torch.library.Library("juggler_tests", "DEF")
_LIBRARY.define("twice(Tensor x) -> Tensor")
_LIBRARY.impl("twice", lambda x: x * 2, "CPU")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each recording, whether TorchScript knows its operations."""
    found: list[bool] = []

    class Watched(recorder._Script):
        def add(self, *given: Any) -> bool:
            found.append(super().add(*given))
            return found[-1]

    monkeypatch.setattr(recorder, "_Script", Watched)
    return found


def assert_is_repeated(function: Callable[[Tensor], dict[str, Tensor]]) -> None:
    """Its operations are made again without it, with the same results for other inputs."""
    recordings, calls = Recordings(1, math.inf), []

    def counted(inputs: Any) -> Any:
        calls.append(None)
        return function(inputs["x"])

    for seed in range(7):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))  # [4, 6]
        found, expected = recordings(counted, {"x": x.clone()}, None), function(x)
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert found[name].dtype == each.dtype, name
            assert found[name].stride() == each.stride(), name
            torch.testing.assert_close(found[name], each, rtol=0, atol=0)
    assert len(calls) == 4, "one that is recorded, and three that are compared"


def with_numbers(x: Tensor) -> dict[str, Tensor]:
    return {
        "times a float": x * 2.5,
        "times an integer": x * 2,
        "less": 1 - x,
        "whole": x.div(2, rounding_mode="floor"),
        "double and float": x.sum() * x.double().sum() + 0.1,
        "an integer for a float": torch.nn.functional.leaky_relu(x, 1),
        "without end": x.clamp(max=math.inf).clamp(min=0),
    }


def with_lists(x: Tensor) -> dict[str, Tensor]:
    ones = torch.tensor([1, 1])  # [2]
    return {
        "one part of three": x.split([1, 2, 3], 1)[1] * 2,
        "indices": x[:, ones],
        "joined": torch.cat([x, x.view(6, 4).t()], 1),
        "sum": x.sum((0, 1)),
        "sum of all": x.sum(()),
        "each": torch._foreach_mul([x, x + 1], 2.0)[1],
    }


def with_words(x: Tensor) -> dict[str, Tensor]:
    return {
        "channels last": x.view(1, 2, 3, 4).clone(memory_format=torch.channels_last),
        "wide": x.to(torch.float64, copy=True),
        "gelu": torch.nn.functional.gelu(x, approximate="tanh"),
        "convolution": torch.nn.functional.conv2d(x.view(1, 1, 4, 6), x.view(6, 1, 2, 2)),
    }


def with_several_outputs(x: Tensor) -> dict[str, Tensor]:
    most, where = x.max(1)  # [4] each
    return {"most": most, "where": where, "norm": torch.nn.functional.layer_norm(x, (6,))}


def in_place(x: Tensor) -> dict[str, Tensor]:
    own = x.clone()  # [4, 6]
    torch._foreach_add_([own, own[0]], 1.0)
    own.mul_(3)[:, 0].relu_()
    return {"own": own, "before": x}


def of_a_library(x: Tensor) -> dict[str, Tensor]:
    return {"twice": torch.ops.juggler_tests.twice(x + 1) - 1}


@pytest.mark.parametrize(
    "function",
    [with_numbers, with_lists, with_words, with_several_outputs, in_place, of_a_library],
)
def test_arguments_of_every_kind_are_handed_on(
    known: list[bool], function: Callable[[Tensor], dict[str, Tensor]]
) -> None:
    assert_is_repeated(function)
    assert known == [True]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.mul(2.0, x),
        lambda x: x.masked_fill(x > 0, True),
        lambda x: (x * 1j).abs(),
    ],
    ids=["a number first", "a bool for a number", "a complex number"],
)
def test_what_torchscript_does_not_know_is_not_recorded(
    known: list[bool], operation: Callable[[Tensor], Tensor]
) -> None:
    recordings, x = Recordings(1, math.inf), torch.ones(4)  # [4]
    for _ in range(6):
        found = recordings(lambda inputs: {"y": operation(inputs["x"] + 1) * 2}, {"x": x}, None)
        torch.testing.assert_close(found["y"], operation(x + 1) * 2, rtol=0, atol=0)
    assert known == [False]
    assert recordings._recorded == 0


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not needs_memory(name)])
def test_torchscript_knows_all_operations_of_an_algorithm(
    make_batch: MakeBatch, known: list[bool], name: str
) -> None:
    core = make_core(name)
    core._recordings = Recordings(1, math.inf)
    learner = Learner(core, seed=1)
    for sample in samples_of(make_batch, 2):
        learner.step(sample)
    assert known
    assert all(known)


@pytest.mark.parametrize("place", [1, 7])
def test_torchscript_of_the_caller_is_optimized_as_before(place: int) -> None:
    def function(inputs: Any) -> Any:
        return {"y": inputs["x"][inputs["place"]]}

    recordings, x = Recordings(1, math.inf), torch.ones(3)  # [3]
    for _ in range(5):
        recordings(function, {"x": x, "place": torch.tensor([0])}, None)
    assert recordings._recorded == 1
    with pytest.raises(IndexError) if place > 2 else nullcontext():
        recordings(function, {"x": x, "place": torch.tensor([place])}, None)
    assert torch._C._get_graph_executor_optimize()
