"""A module whose parameters lie in one vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from juggler.runtime.modules.rl_module import Batch, RLModule


class FlatModule:
    """A module's structure, and where each of its parameters lies in a flat vector [P].

    With all parameters in one vector, an optimizer step, a norm or a reduction over learners is a
    few operations whatever the number of layers. Parameters that need no gradient count as buffers.
    """

    def __init__(self, module: RLModule) -> None:
        trained = _trained(module)
        if not trained:
            raise ValueError(f"{type(module).__name__} has no parameters to train")
        if dtypes := {parameter.dtype for parameter in trained.values()} - {torch.float32}:
            names = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise ValueError(
                f"{type(module).__name__} has parameters in {names}: trained parameters must be "
                "float32; a module may compute in other dtypes under torch.autocast"
            )
        self._module = module
        self._shapes = {name: parameter.shape for name, parameter in trained.items()}
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]

    @property
    def module(self) -> RLModule:
        return self._module

    def flatten(self, module: RLModule) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of the parameters [P] and buffers of a module of the same structure."""
        trained = _trained(module)
        buffers = dict(module.named_buffers())
        buffers.update((n, p) for n, p in module.named_parameters() if n not in trained)
        flat = torch.cat([trained[name].detach().reshape(-1) for name in self._shapes])  # [P]
        return flat, {name: buffer.detach().clone() for name, buffer in buffers.items()}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector [P] by parameter name."""
        pieces = torch.split(flat, self._sizes)  # [p] each
        return {
            name: piece.view(shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def __call__(
        self, parameters: Tensor, buffers: dict[str, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        """The module's training pass with these parameters [P] and buffers.

        Buffers that the pass updates in place (those of a normalization, say) are the ones given.
        """
        named = {**self.named(parameters), **buffers}
        outputs: dict[str, Tensor] = torch.func.functional_call(self._module, named, (batch,))
        return outputs


def _trained(module: RLModule) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
