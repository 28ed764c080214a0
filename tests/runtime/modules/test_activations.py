"""The fast hyperbolic tangent against torch's, on CPUs of either kind."""

from __future__ import annotations

import pytest
import torch

from juggler.runtime.modules import layers
from juggler.runtime.modules.layers import Tanh


@pytest.fixture(autouse=True, params=[True, False], ids=["intel", "another"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(layers, "_mkl_is_fast", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("size", [100, 100_000])
def test_tanh_and_its_gradient_are_those_of_torch(size: int) -> None:
    x = torch.linspace(-20, 20, size, requires_grad=True)
    y, expected = Tanh()(x), torch.tanh(x)
    torch.testing.assert_close(y, expected, atol=3e-7, rtol=0)
    gradient = torch.linspace(1, 2, size)
    (found,) = torch.autograd.grad(y, x, gradient)
    (wanted,) = torch.autograd.grad(expected, x, gradient)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_tanh_works_under_the_transforms_of_torch_func() -> None:
    x = torch.randn(3, 20_000)
    grad = torch.func.vmap(torch.func.grad(lambda row: Tanh()(row).sum()))(x)
    torch.testing.assert_close(grad, 1 - torch.tanh(x).square(), atol=1e-6, rtol=0)


def test_only_intel_computes_large_tensors_by_torch_alone(cpu: bool) -> None:
    x = torch.linspace(-3, 3, 100_000)
    by_torch = torch.equal(Tanh()(x), torch.tanh(x))
    assert by_torch == cpu
