"""A recurrent layer remembers before it has learned to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from juggler.runtime.modules.model_config import ModelConfig
from juggler.runtime.modules.recurrent_cores import RecurrentCore

KINDS = ("lstm", "gru")
STEPS = 20


def core(kind: str, **keys: Any) -> RecurrentCore:
    torch.manual_seed(0)
    return RecurrentCore(8, ModelConfig.parse({"recurrent": kind, **keys}))


def run(layer: RecurrentCore, features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    start = layer.get_initial_state()
    initial = {name: state.expand(len(features), -1) for name, state in start.items()}
    outputs, states = layer(features, initial)
    return outputs, states


def reaches(layer: RecurrentCore) -> float:
    """How much of a step's features is left in the output 20 steps later, by its gradient: the mean
    over 64 sequences, against that at the step itself."""
    features = torch.randn(64, STEPS + 1, 8, generator=torch.Generator().manual_seed(1))
    features.requires_grad_()
    outputs, _ = run(layer, features)
    weights = torch.randn(layer.size, generator=torch.Generator().manual_seed(2))
    (late,) = torch.autograd.grad(outputs[:, STEPS] @ weights, features, torch.ones(64))
    return float(late[:, 0].norm() / late[:, STEPS].norm())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_seen_twenty_steps_ago_still_counts(kind: str) -> None:
    assert reaches(core(kind)) > 0.01
    assert reaches(core(kind, memory_bias=0.0)) < 1e-4
    assert reaches(core(kind, memory_bias=4.0)) > reaches(core(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [-1.0, 0, 2.0, 3.5])
def test_a_memory_that_nothing_adds_to_fades_with_the_gate(kind: str, bias: float) -> None:
    """The gates' own equations: with weights of 0, each step keeps sigmoid(bias) of the memory."""
    layer = core(kind, memory_bias=bias)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "weight" in name:
                parameter.zero_()
        states = {name: torch.full((1, layer.size), 0.5) for name in layer.get_initial_state()}
        _, after = layer(torch.zeros(1, STEPS, 8), states)
    kept = (1 / (1 + math.exp(-bias))) ** STEPS
    memory = after["cell" if kind == "lstm" else "hidden"]
    torch.testing.assert_close(memory, torch.full_like(memory, 0.5 * kept))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("initializer", ["orthogonal", "default"])
def test_only_the_bias_of_that_gate_is_another(kind: str, initializer: str) -> None:
    plain, biased = (
        dict(core(kind, initializer=initializer, memory_bias=bias).named_parameters())
        for bias in (0.0, 2.0)
    )
    assert plain.keys() == biased.keys()
    for name, parameter in biased.items():
        added = torch.zeros_like(parameter)
        if name.endswith("bias_ih_l0"):
            added[64:128] = 2.0
        torch.testing.assert_close(parameter, plain[name] + added)


@pytest.mark.parametrize("bias", ["2", None, float("nan"), float("inf"), True])
def test_a_bias_that_is_no_number_is_refused(bias: object) -> None:
    with pytest.raises(ValueError, match="memory_bias must be a finite number"):
        ModelConfig.parse({"recurrent": "lstm", "memory_bias": bias})
