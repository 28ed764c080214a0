"""The training passes of modules: in which precision, and whether compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from juggler.learner.optim.places import Places
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.structures import tree_map


class TrainingPass:
    """Calls `forward_train` of modules with tensors that replace their own.

    Attributes:
        compiled_calls: how often graphs compiled by torch.compile have run.
    """

    def __init__(self, *, bfloat16: bool = False, compiled: bool = False) -> None:
        """Args:
            bfloat16: whether passes run under torch.autocast; their outputs are float32 again.
            compiled: whether torch.compile compiles passes, for any number of rows. The first pass
                of each module is not compiled, because its specs are checked then.

        Raises:
            ValueError: `compiled` is set, and there is no C++ compiler.
        """
        self.compiled_calls = 0
        self._bfloat16 = bfloat16
        self._compiled: Callable[..., Any] | None = None
        self._places: dict[RLModule, Places] = {}  # of modules that have made a pass
        if compiled:
            _check_compiler()
            self._compiled = torch.compile(_call, backend=self._counted)

    def __call__(
        self, module: RLModule, tensors: dict[str, Tensor], batch: Batch
    ) -> dict[str, Any]:
        """A module's pass with these parameters and buffers, each listed under all of its names.
        The pass may update the given buffers in place."""
        if not self._bfloat16:
            return self._outputs(module, tensors, batch)
        with torch.autocast(next(iter(tensors.values())).device.type, torch.bfloat16):
            outputs = self._outputs(module, tensors, batch)
        return {name: tree_map(_float32, x) for name, x in outputs.items()}

    def _outputs(
        self, module: RLModule, tensors: dict[str, Tensor], batch: Batch
    ) -> dict[str, Any]:
        outputs: dict[str, Any]
        if self._compiled is not None and module in self._places:
            tree_map(_any_rows, batch)
            outputs = self._compiled(module, tensors, (batch,))
        else:
            if module not in self._places:
                self._places[module] = Places(module)
            outputs = self._places[module].call(tensors, batch)
        return outputs

    def _counted(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """The backend for torch.compile: its default one, with calls counted."""
        compile_graph = torch._dynamo.lookup_backend("inductor")
        return partial(self._count, compile_graph(graph, inputs))

    def _count(self, compiled: Callable[..., Any], *inputs: Any) -> Any:
        self.compiled_calls += 1
        return compiled(*inputs)


def _call(module: RLModule, tensors: dict[str, Tensor], arguments: tuple[Batch]) -> Any:
    # torch.compile traces our functions, but not those of torch.
    return functional_call(module, tensors, arguments, tie_weights=False)


def _any_rows(x: Tensor) -> None:
    """Let code compiled for this tensor [B, ...] serve every B."""
    torch._dynamo.maybe_mark_dynamic(x, 0)


def _float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype is torch.bfloat16 else x


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "compile = true: torch.compile needs a C++ compiler, and this host has none. Install "
            "g++ or clang, name one in the environment variable CXX, or set compile = false"
        ) from error
