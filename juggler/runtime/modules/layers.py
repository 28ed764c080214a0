"""Layers of the default modules."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from juggler.runtime.modules.activations import Tanh
from juggler.runtime.modules.model_config import ModelConfig

#: By the names that `activation` may have.
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU}

L = TypeVar("L", nn.Linear, nn.Conv2d)

# The most inputs of a narrow layer, and from how many outputs over all rows its copy pays.
_NARROW, _WORTH_IT = 24, 1 << 17


def initialized(layer: L, initializer: str, gain: float = math.sqrt(2)) -> L:
    """The layer with its weights initialized according to `ModelConfig.initializer`.

    Orthogonal weights are those of Saxe et al. 2013, "Exact solutions to the nonlinear dynamics of
    learning in deep linear neural networks".
    """
    if initializer == "orthogonal":
        nn.init.orthogonal_(layer.weight, gain)
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    return layer


class Linear(nn.Linear):
    """A linear layer, whose gradient on CPUs is fast for many rows if it has few inputs.

    The gradient of its weights is a product of outputs [H, B] and inputs [B, F]. With an F of 4,
    it takes MKL up to ten times as long as the product of inputs [F, B] and outputs [B, H], which
    torch chooses if weights lie in memory column by column.
    """

    def forward(self, input: Tensor) -> Tensor:
        if (
            torch.compiler.is_compiling()  # first, or what is compiled holds for these sizes alone
            or not self.in_features <= _NARROW < self.out_features
            or input.numel() * self.out_features < _WORTH_IT * self.in_features
            or input.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
            or not torch.is_grad_enabled()
        ):
            return linear(input, self.weight, self.bias)
        return linear(input, self.weight.t().contiguous().t(), self.bias)


class MLP(nn.Sequential):
    """Hidden layers, which map numbers [B, ...] of any shape and dtype to [B, size]."""

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        """
        Args:
            inputs: F, the numbers in one observation.
            config: for hidden_sizes, activation and initializer.
        """
        layers: list[nn.Module] = []
        size = inputs
        for hidden in config.hidden_sizes:
            layers.append(initialized(Linear(size, hidden), config.initializer))
            layers.append(ACTIVATIONS[config.activation]())
            size = hidden
        super().__init__(*layers)
        self.inputs, self.size = inputs, size

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            x = x.float()  # [B, ...]
        if x.ndim != 2:
            x = x.reshape(-1, self.inputs)  # [B, F]
        y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]  # [B, H]
        return y
