"""Modules in float64, for losses that are written out slowly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from torch import Tensor

from juggler.runtime.modules.rl_module import RLModule


class Doubled:
    """A module with the numbers of a flat tensor of all its parameters, in float64.

    Args:
        module: whose parameters these become.
        parameters: [P]
    """

    def __init__(self, module: RLModule, parameters: Tensor) -> None:
        rest = parameters.detach().double()
        for parameter in module.parameters():
            parameter.data = rest[: parameter.numel()].view_as(parameter).clone()
            rest = rest[parameter.numel() :]
        assert not rest.numel()
        self.module = module.double()

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of `forward_train`, whose specs would have float32."""
        exact = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
        # Layers turn what they see into float32.
        with patch.object(Tensor, "float", Tensor.double):
            outputs: dict[str, Any] = self.module._forward_train(exact)
        assert all("64" in str(x.dtype) for x in outputs.values())
        return outputs
