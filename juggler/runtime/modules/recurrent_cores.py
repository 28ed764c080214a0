"""Recurrent cores, between encoder and heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from juggler.runtime.modules.model_config import ModelConfig


class RecurrentCore(nn.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997) or a GRU (Cho et al. 2014).

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
        # The second gate of each: the LSTM's forget gate and the GRU's update gate, both of which
        # keep the memory while they are open.
        with torch.no_grad():
            dict(self.layer.named_parameters())["bias_ih_l0"][size : 2 * size] += config.memory_bias

    def get_initial_state(self) -> dict[str, Tensor]:
        names = ("hidden", "cell") if isinstance(self.layer, nn.LSTM) else ("hidden",)
        return {name: torch.zeros(self.size) for name in names}  # [H] each

    def forward(self, features: Tensor, states: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Maps features [B, T, F] and the state [B, ...] before them to [B, T, H] and the state
        after them."""
        hidden = states["hidden"].unsqueeze(0)  # [1, B, H]
        if isinstance(self.layer, nn.GRU):
            outputs, hidden = self.layer(features, hidden)  # [B, T, H] and [1, B, H]
            return outputs, {"hidden": hidden.squeeze(0)}  # [B, H]
        cell = states["cell"].unsqueeze(0)  # [1, B, H]
        outputs, (hidden, cell) = self.layer(features, (hidden, cell))
        return outputs, {"hidden": hidden.squeeze(0), "cell": cell.squeeze(0)}  # [B, H] both
