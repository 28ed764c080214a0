"""Layers in NumPy, those that are worth it or that cannot be taken apart.

A layer is in `LAYERS` by its very class: a subclass may do something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from juggler.runtime.modules.activations import Tanh
from juggler.runtime.modules.arrays.live import LiveArrays, NotKnown
from juggler.runtime.modules.arrays.operations import sigmoid
from juggler.runtime.modules.encoders import Numbers, OneHot
from juggler.runtime.modules.layers import MLP, Linear

Array = NDArray[Any]
#: What a layer does with arrays; it has the parameters of the layer's `forward`.
ArrayFunction = Callable[..., Any]

# In the memory of their inputs.
_HIDDEN: dict[type[nn.Module], ArrayFunction] = {
    Tanh: lambda x: np.tanh(x, out=x),
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
}


def _linear(layer: nn.Linear, live: LiveArrays) -> ArrayFunction:
    weights = live.transposed(layer.weight)  # [F, H]
    bias = None if layer.bias is None else live.view(layer.bias)  # [H]

    def run(input: Array) -> Array:  # as torch has it
        flat = input if input.ndim == 2 else input.reshape(-1, input.shape[-1])  # [B, F]
        y: Array = flat @ weights  # [B, H]
        if bias is not None:
            y += bias  # [B, H]
        return y if input.ndim == 2 else y.reshape(*input.shape[:-1], y.shape[-1])  # [..., H]

    return run


def _mlp(layers: MLP, live: LiveArrays) -> ArrayFunction:
    size, steps = layers.inputs, []
    for layer in layers:
        if isinstance(layer, nn.Linear) and type(layer) in (Linear, nn.Linear):
            steps.append(_linear(layer, live))
        elif type(layer) in _HIDDEN and steps:  # there is new memory to write into
            steps.append(_HIDDEN[type(layer)])
        elif type(layer) is not nn.Dropout:  # which does nothing here
            raise NotKnown(f"it has a {type(layer).__name__} among its hidden layers")

    def run(x: Array) -> Array:
        y = np.asarray(x, np.float32).reshape(-1, size)  # [B, F]
        for step in steps:
            y = step(y)  # [B, H]
        return y

    return run


def _numbers(layer: Numbers, live: LiveArrays) -> ArrayFunction:
    size, scale = layer.size, layer.scale

    def run(x: Array) -> Array:
        y = x.reshape(-1, size).astype(np.float32)  # [B, F]
        return y if scale is None else np.multiply(y, np.float32(scale), out=y)  # [B, F]

    return run


def _one_hot(layer: OneHot, live: LiveArrays) -> ArrayFunction:
    first, size, space = live.view(layer.first), layer.size, layer.space

    def run(x: Array) -> Array:
        places = x.reshape(-1, layer.choices).astype(np.int64) + first  # [B, k]
        if len(places) and (places.min() < 0 or places.max() >= size):
            raise ValueError(f"observations hold what is not in {space}")
        ones = np.zeros((len(places), size), np.float32)  # [B, F]
        np.put_along_axis(ones, places, 1.0, -1)
        return ones

    return run


def _lstm_step(x: Array, hidden: Array, cell: Array, weights: Array) -> tuple[Array, Array]:
    """
    Args:
        x: the inputs' part of the gates [B, 4 H].
        hidden: [B, H]
        cell: [B, H]
        weights: of the hidden state [H, 4 H].
    """
    gates = hidden @ weights  # [B, 4 H]
    gates += x  # [B, 4 H]
    size = hidden.shape[-1]
    opens = sigmoid(gates[:, : 2 * size])  # [B, 2 H] the input gate and the forget gate
    after = opens[:, size:] * cell + opens[:, :size] * np.tanh(gates[:, 2 * size : 3 * size])
    return sigmoid(gates[:, 3 * size :]) * np.tanh(after), after  # [B, H] both


def _gru_step(x: Array, hidden: Array, weights: Array, bias: Array) -> Array:
    """
    Args:
        x: the inputs' part of the gates [B, 3 H].
        hidden: [B, H]
        weights: of the hidden state [H, 3 H].
        bias: of the hidden state [3 H].
    """
    gates = hidden @ weights  # [B, 3 H]
    gates += bias  # [B, 3 H]
    size = hidden.shape[-1]
    opens = sigmoid(x[:, : 2 * size] + gates[:, : 2 * size])  # [B, 2 H] reset and update
    new = np.tanh(x[:, 2 * size :] + opens[:, :size] * gates[:, 2 * size :])  # [B, H]
    keep = opens[:, size:]  # [B, H]
    after: Array = new + keep * (hidden - new)  # [B, H]
    return after


class _Cell:
    """The parameters of an LSTM or GRU, which torch names the same in cells and in layers."""

    def __init__(self, layer: nn.Module, live: LiveArrays, suffix: str) -> None:
        names = [f"{kind}_{side}{suffix}" for kind in ("weight", "bias") for side in ("ih", "hh")]
        found: list[Any] = [getattr(layer, name, None) for name in names]
        if None in [each if each is None else 1 for each in found]:
            raise NotKnown(f"a {type(layer).__name__} has no biases")
        self._weights = live.transposed(found[0])  # [F, G]
        self._bias = live.view(found[2])  # [G]
        self.hidden_weights = live.transposed(found[1])  # [H, G]
        self.hidden_bias = live.view(found[3])  # [G]

    def inputs(self, x: Array) -> Array:
        """The inputs' part of the gates [B, G]."""
        gates: Array = x @ self._weights  # [B, G]
        gates += self._bias  # [B, G]
        return gates


def _lstm_cell(layer: nn.LSTMCell, live: LiveArrays) -> ArrayFunction:
    cell = _Cell(layer, live, "")

    def run(input: Array, hx: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        blank = np.zeros((len(input), layer.hidden_size), np.float32)  # [B, H]
        hidden, memory = hx or (blank, blank)  # [B, H] both
        return _lstm_step(
            cell.inputs(input) + cell.hidden_bias, hidden, memory, cell.hidden_weights
        )

    return run


def _gru_cell(layer: nn.GRUCell, live: LiveArrays) -> ArrayFunction:
    cell = _Cell(layer, live, "")

    def run(input: Array, hx: Array | None = None) -> Array:
        hidden = np.zeros((len(input), layer.hidden_size), np.float32) if hx is None else hx
        return _gru_step(cell.inputs(input), hidden, cell.hidden_weights, cell.hidden_bias)

    return run


def _recurrent(layer: nn.LSTM | nn.GRU, live: LiveArrays) -> ArrayFunction:
    """One layer over sequences [B, T, F], with states [1, B, H]."""
    plain = layer.num_layers == 1 and not layer.bidirectional and not layer.proj_size
    if not (plain and layer.batch_first):
        raise NotKnown(f"its {type(layer).__name__} is not one layer with batch_first=True")
    cell = _Cell(layer, live, "_l0")

    def begin(inputs: Array) -> Array:
        return np.zeros((1, len(inputs), layer.hidden_size), np.float32)  # [1, B, H]

    def lstm(inputs: Array, hx: Any = None) -> tuple[Array, tuple[Array, Array]]:
        hidden, memory = (each[0] for each in (hx or [begin(inputs)] * 2))  # [B, H] both
        outputs = np.empty((*inputs.shape[:2], layer.hidden_size), np.float32)  # [B, T, H]
        for t in range(inputs.shape[1]):
            x = cell.inputs(inputs[:, t]) + cell.hidden_bias  # [B, 4 H]
            hidden, memory = _lstm_step(x, hidden, memory, cell.hidden_weights)
            outputs[:, t] = hidden
        return outputs, (hidden[None], memory[None])

    def gru(inputs: Array, hx: Any = None) -> tuple[Array, Array]:
        hidden = (begin(inputs) if hx is None else hx)[0]  # [B, H]
        outputs = np.empty((*inputs.shape[:2], layer.hidden_size), np.float32)  # [B, T, H]
        for t in range(inputs.shape[1]):
            x = cell.inputs(inputs[:, t])  # [B, 3 H]
            hidden = _gru_step(x, hidden, cell.hidden_weights, cell.hidden_bias)
            outputs[:, t] = hidden
        return outputs, hidden[None]

    return lstm if isinstance(layer, nn.LSTM) else gru


#: By the class of a layer, what makes its function.
LAYERS: dict[type[nn.Module], Callable[[Any, LiveArrays], ArrayFunction]] = {
    Linear: _linear,
    nn.Linear: _linear,
    MLP: _mlp,
    Tanh: lambda layer, live: np.tanh,
    Numbers: _numbers,
    OneHot: _one_hot,
    nn.LSTM: _recurrent,
    nn.GRU: _recurrent,
    nn.LSTMCell: _lstm_cell,
    nn.GRUCell: _gru_cell,
}
