"""What captures graphs on the CPU as CUDA does: the same operations, on the same memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class FakeGraph(TorchDispatchMode):
    """Notes operations between `capture_begin` and `capture_end`, and makes them again."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.replays = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, outputs in self._made:
            again = func(*args, **kwargs)
            for old, new in zip(outputs, _tensors(again), strict=True):
                old.copy_(new)  # to where the graph has it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self._made.append((func, args, kwargs or {}, _tensors(outputs)))
        return outputs


def _tensors(outputs: Any) -> list[Tensor]:
    each = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [x for x in each if isinstance(x, Tensor)]


class FakeDevice:
    """Stands in for torch.cuda."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def CUDAGraph(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        return self.graphs[-1]

    def Stream(self, device: object, priority: int) -> Any:
        return _FakeStream()

    def current_stream(self, device: object = None) -> Any:
        return _FakeStream()

    def stream(self, stream: object) -> Any:
        return contextlib.nullcontext()

    def device(self, device: torch.device) -> Any:
        assert device.type == "cpu"
        return contextlib.nullcontext()


class _FakeStream:
    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass
