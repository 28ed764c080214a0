"""Fast layers against those of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from juggler.runtime.modules import layers
from juggler.runtime.modules.layers import Linear, Tanh


@pytest.fixture(params=[True, False], ids=["intel", "another"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(layers, "_mkl_is_fast", lambda: request.param)
    return bool(request.param)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("size", [100, 100_000])
def test_tanh_and_its_gradient_are_those_of_torch(size: int) -> None:
    x = torch.linspace(-20, 20, size, requires_grad=True)
    y, expected = Tanh()(x), torch.tanh(x)
    torch.testing.assert_close(y, expected, atol=3e-7, rtol=0)
    gradient = torch.linspace(1, 2, size)
    (found,) = torch.autograd.grad(y, x, gradient)
    (wanted,) = torch.autograd.grad(expected, x, gradient)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("cpu")
def test_tanh_works_under_the_transforms_of_torch_func() -> None:
    x = torch.randn(3, 20_000)
    grad = torch.func.vmap(torch.func.grad(lambda row: Tanh()(row).sum()))(x)
    torch.testing.assert_close(grad, 1 - torch.tanh(x).square(), atol=1e-6, rtol=0)


def test_only_intel_computes_large_tensors_by_torch_alone(cpu: bool) -> None:
    x = torch.linspace(-3, 3, 100_000)
    by_torch = torch.equal(Tanh()(x), torch.tanh(x))
    assert by_torch == cpu


# Linear layers with few inputs have torch's gradient, by a fast product.


MANY, FEW = 3000, 5


@pytest.mark.parametrize("shape", [(FEW, 4), (MANY, 4), (2, MANY // 2, 4), (MANY, 60)])
def test_a_linear_layer_and_its_gradient_are_those_of_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = Linear(shape[-1], 64), torch.randn(shape, requires_grad=True)
    inputs = [x, layer.weight, layer.bias]
    y, expected = layer(x), linear(x, layer.weight, layer.bias)  # [..., H]
    torch.testing.assert_close(y, expected)
    gradient = torch.randn(y.shape)
    found = torch.autograd.grad(y, inputs, gradient)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_it_works_under_the_transforms_of_torch_func() -> None:
    torch.manual_seed(0)
    layer, x = Linear(4, 64), torch.randn(3, MANY, 4)

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(layer, {"weight": weight}, (x,))
        return outputs.square().mean()  # type: ignore[no-any-return]

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(layer.weight, x)  # [3, H, F]
    for own, each in zip(found, x, strict=True):
        (expected,) = torch.autograd.grad(
            linear(each, layer.weight, layer.bias).square().mean(), [layer.weight]
        )
        torch.testing.assert_close(own, expected)


def test_an_exported_layer_takes_any_number_of_rows() -> None:
    layer, batch = Linear(4, 64), torch.export.Dim("batch")
    program = torch.export.export(layer, (torch.randn(2, 4),), dynamic_shapes=({0: batch},))
    x = torch.randn(MANY, 4)
    torch.testing.assert_close(program.module()(x), layer(x))


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the shapes of what matrix products make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.made.append(tuple(outputs.shape))
        return outputs


@pytest.mark.parametrize(
    ("rows", "inputs", "made"), [(MANY, 4, (4, 64)), (FEW, 4, (64, 4)), (MANY, 60, (64, 60))]
)
def test_weights_of_few_inputs_and_many_rows_have_their_gradient_as_a_narrow_product(
    rows: int, inputs: int, made: tuple[int, int]
) -> None:
    layer = Linear(inputs, 64)
    with Products() as products:
        layer(torch.randn(rows, inputs)).sum().backward()
    assert products.made == [made]
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (64, inputs)
