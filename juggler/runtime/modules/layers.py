"""Layers and heads of the modules that ship."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.modules.distributions.base import DistributionSpec

# Below this size, torch.tanh is faster.
_WORTH_A_SIGMOID = 1 << 14


class Tanh(nn.Module):
    """tanh by the sigmoid, for large tensors on non-Intel CPUs.

    There, torch's tanh takes ten times as long as its sigmoid: a third of the update of a small
    perceptron. tanh(x) = 2 sigmoid(2x) - 1 differs from it by at most 2e-7. On Intel CPUs, torch
    uses MKL's tanh, which takes no longer than the sigmoid.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Compilation and export get the plain operation, for every size.
        if (
            x.device.type != "cpu"
            or torch.compiler.is_compiling()
            or x.numel() < _WORTH_A_SIGMOID
            or _mkl_is_fast()
        ):
            return torch.tanh(x)
        y: Tensor = _TanhBySigmoid.apply(x)  # type: ignore[no-untyped-call]
        return y


@cache
def _mkl_is_fast() -> bool:
    """Return whether torch computes tanh by MKL with fast code."""
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            intel = "GenuineIntel" in cpuinfo.read(1000)
    except OSError:  # unknown on this system
        intel = False
    return intel and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


class _TanhBySigmoid(torch.autograd.Function):
    """Stores only its output for the backward pass, as torch.tanh does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (2 * x).sigmoid_().mul_(2).sub_(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        onward: Tensor = torch.ops.aten.tanh_backward(gradient, y)
        return onward


# torch reads the signature in every call; making it each time takes longer than the rest of the
# call.
_TanhBySigmoid.forward.__signature__ = signature(_TanhBySigmoid.forward)  # type: ignore[attr-defined]


#: Classes by value of `activation`.
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU}

L = TypeVar("L", nn.Linear, nn.Conv2d)

# Maximum inputs of a narrow layer, and number of outputs over all rows from which on its copy pays.
_NARROW, _WORTH_IT = 24, 1 << 17


def initialized(layer: L, initializer: str, gain: float = math.sqrt(2)) -> L:
    """Initialize a layer's weights according to `ModelConfig.initializer`.

    Orthogonal weights: Saxe et al. 2013, "Exact solutions to the nonlinear dynamics of learning in
    deep linear neural networks".
    """
    if initializer == "orthogonal":
        nn.init.orthogonal_(layer.weight, gain)
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    return layer


class Linear(nn.Linear):
    """A linear layer with fast CPU gradients for few inputs.

    The gradient of its weights is a product of outputs [H, B] and inputs [B, F]. With an F of 4,
    it takes MKL up to ten times as long as the product of inputs [F, B] and outputs [B, H], which
    torch chooses if weights lie in memory column by column.
    """

    def forward(self, input: Tensor) -> Tensor:
        if (
            torch.compiler.is_compiling()  # first: or the compiled code holds only for these sizes
            or not self.in_features <= _NARROW < self.out_features
            or input.numel() * self.out_features < _WORTH_IT * self.in_features
            or input.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
            or not torch.is_grad_enabled()
        ):
            return linear(input, self.weight, self.bias)
        return linear(input, self.weight.t().contiguous().t(), self.bias)


class MLP(nn.Sequential):
    """Hidden layers that map numbers [B, ...] to [B, size].

    Args:
        inputs: F, the count of numbers in one observation.
        config: for hidden_sizes, activation and initializer.
    """

    def __init__(self, inputs: int, config: ModelConfig) -> None:
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


class RecurrentCore(nn.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997) or GRU (Cho et al. 2014).

    Its state is a map: "hidden" [B, H], and for the LSTM "cell" [B, H].
    """

    def __init__(self, inputs: int, config: ModelConfig) -> None:
        super().__init__()
        self.size = size = config.recurrent_size
        kind = nn.LSTM if config.recurrent == "lstm" else nn.GRU
        self.layer = kind(inputs, size, batch_first=True)
        if config.initializer == "orthogonal":
            for name, parameter in self.layer.named_parameters():
                if name.startswith("weight"):
                    nn.init.orthogonal_(parameter)
                else:
                    nn.init.zeros_(parameter)
        # The second gate of each: the LSTM's forget gate and the GRU's update gate, which keep the
        # memory while open.
        with torch.no_grad():
            dict(self.layer.named_parameters())["bias_ih_l0"][size : 2 * size] += config.memory_bias

    def get_initial_state(self) -> dict[str, Tensor]:
        names = ("hidden", "cell") if isinstance(self.layer, nn.LSTM) else ("hidden",)
        return {name: torch.zeros(self.size) for name in names}  # [H] each

    def forward(self, features: Tensor, states: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Map features [B, T, F] to [B, T, H], and update states."""
        hidden = states["hidden"].unsqueeze(0)  # [1, B, H]
        if isinstance(self.layer, nn.GRU):
            outputs, hidden = self.layer(features, hidden)  # [B, T, H] and [1, B, H]
            return outputs, {"hidden": hidden.squeeze(0)}  # [B, H]
        cell = states["cell"].unsqueeze(0)  # [1, B, H]
        outputs, (hidden, cell) = self.layer(features, (hidden, cell))
        return outputs, {"hidden": hidden.squeeze(0), "cell": cell.squeeze(0)}  # [B, H] both


def policy_head(features: int, distribution: DistributionSpec, config: ModelConfig) -> nn.Module:
    """Build a head from F features to small "action_dist_inputs" [..., D].

    Args:
        features: F.
        distribution: determines D, and which inputs are log standard deviations.
        config: for free_log_std and initializer.
    """
    free = distribution.log_std_inputs if config.free_log_std else []
    linear = nn.Linear(features, distribution.inputs_size - len(free))
    initialized(linear, config.initializer, gain=0.01)
    return FreeLogStd(linear, free) if free else linear


class FreeLogStd(nn.Module):
    """A head whose log standard deviations are state-independent parameters.

    Args:
        others: the head of all other inputs.
        log_std_at: positions of the log standard deviations among all inputs.
    """

    def __init__(self, others: nn.Linear, log_std_at: Sequence[int]) -> None:
        super().__init__()
        self.others = others
        self.log_std = nn.Parameter(torch.zeros(len(log_std_at)))  # [M]
        size = others.out_features + len(log_std_at)
        order = [i for i in range(size) if i not in log_std_at] + list(log_std_at)  # of [D]
        places = None if order == list(range(size)) else torch.tensor(order).argsort()  # [D]
        self.places: Tensor | None
        self.register_buffer("places", places)

    def forward(self, features: Tensor) -> Tensor:
        others = self.others(features)  # [..., D - M]
        log_std = self.log_std.expand(others.shape[:-1] + self.log_std.shape)  # [..., M]
        inputs = torch.cat([others, log_std], -1)  # [..., D]
        return inputs if self.places is None else inputs[..., self.places]


class DuelingHead(nn.Module):
    """Action values from state values and advantages (dueling).

        Q(x, a) = V(x) + A(x, a) - 1/n Σ_b A(x, b)        (equation 9)

    V and A each have their own hidden layer, as wide as the features. The mean is over all n
    actions, including masked ones, so it does not depend on legality.

    Args:
        features: F.
        actions: n.
        numbers: K, numbers estimated per action: 1, or the logits of K returns.
        config: for activation and initializer.
    """

    def __init__(self, features: int, actions: int, numbers: int, config: ModelConfig) -> None:
        super().__init__()
        self.shape = (actions, numbers)
        self.value = _stream(features, numbers, config)
        self.advantages = _stream(features, actions * numbers, config)

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., F] -> [..., n K]."""
        value = self.value(features).unsqueeze(-2)  # [..., 1, K]
        advantages = self.advantages(features).unflatten(-1, self.shape)  # [..., n, K]
        found: Tensor = value + advantages - advantages.mean(-2, keepdim=True)  # [..., n, K]
        return found.flatten(-2)  # [..., n K]


def _stream(features: int, outputs: int, config: ModelConfig) -> nn.Sequential:
    """Build a normalized hidden layer and a linear one, for a `QNetwork`."""
    return nn.Sequential(
        initialized(nn.Linear(features, features), config.initializer),
        ACTIVATIONS[config.activation](),
        nn.LayerNorm(features),
        initialized(nn.Linear(features, outputs), config.initializer, gain=0.01),
    )
