"""Graphs of a GPU: the kernels of a function, launched together by one call.

A small update takes some hundred kernels of a few microseconds, and the host needs longer than that
to launch each of them: the GPU waits. A CUDA graph launches them all at once. It reads and writes
the same memory each time, so inputs are copied there, and outputs from there.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.recorded_operations import Repeat, Watch
from juggler.learner.core.tensor_trees import TensorTree, filled, placed

_log = logging.getLogger(__name__)

#: Held during a capture, since all those on a device go onto one stream.
_CAPTURING = threading.Lock()
#: Backends with which a capture has failed in this process. torch's allocator may hold it for one
#: that goes on, so there is no other one.
_FAILED: set[Any] = set()


class DeviceGraphs:
    """Captures functions of trees of tensors as graphs, each with memory of its own for what lies
    between inputs and outputs."""

    def __init__(self, backend: Any = torch.cuda) -> None:
        """Args:
        backend: the torch module with graphs and streams of the device.
        """
        self._backend = backend

    def wait(self, device: torch.device) -> None:
        """Wait until a device is done with this thread's work."""
        self._backend.current_stream(device).synchronize()

    def captured(
        self,
        function: Callable[[TensorTree], TensorTree],
        inputs: TensorTree,
        leaves: list[Tensor],
    ) -> tuple[TensorTree, Repeat | None]:
        """Call a function of a tree, whose tensors are `leaves` -> what it returns, and what makes
        its operations again; none: it cannot be captured, or would be wrong for other inputs, or a
        capture has failed before."""
        with (watch := _DeviceWatch(leaves)):
            outputs = function(inputs)
        made: list[Tensor] = []
        placed(outputs, made)
        read = watch.read | set(map(id, made))
        places = [place for place, x in enumerate(leaves) if id(x) in read]
        if not watch.is_repeatable or any(x.device != leaves[0].device for x in [*leaves, *made]):
            return outputs, None
        with _CAPTURING, self._backend.device(leaves[0].device):
            if self._backend in _FAILED:
                return outputs, None
            try:
                return outputs, self._capture(function, inputs, leaves, places, watch.constants)
            except RuntimeError as error:  # such as memory that is not there
                _FAILED.add(self._backend)
                _log.warning(
                    "operations of an update could not be captured as a graph; no others will be "
                    "captured in this process, and some updates take longer: %s",
                    error,
                )
                return outputs, None

    def _capture(
        self,
        function: Callable[[TensorTree], TensorTree],
        inputs: TensorTree,
        leaves: list[Tensor],
        places: list[int],
        constants: list[Tensor],
    ) -> Repeat:
        kept = {place: leaves[place].clone() for place in places}
        fixed = filled(placed(inputs, []), [kept.get(i, x) for i, x in enumerate(leaves)])
        backend = self._backend
        graph, stream = backend.CUDAGraph(), _capture_stream(backend, leaves[0].device)
        stream.wait_stream(backend.current_stream())
        with backend.stream(stream):
            # Other threads go on with copies meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                made: list[Tensor] = []
                template = placed(function(fixed), made)
                packed = _Packed.of(made)
            finally:
                graph.capture_end()
        backend.current_stream().wait_stream(stream)
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for place, x in kept.items():
            by_dtype[x.dtype].append(place)
        into = [([kept[place] for place in own], own) for own in by_dtype.values()]
        return _Captured(graph, into, template, packed, constants).repeat


@cache
def _capture_stream(backend: Any, device: torch.device) -> Any:
    """The stream for captures on a device, of which there is one. torch hands out few, again and
    again: this one is of those for urgent work, so that nobody copies on it."""
    return backend.Stream(device, priority=-1)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A function that was captured.

    Attributes:
        graph: of its kernels.
        into: the graph's inputs of one kind, and the places of those in a call.
        template: the outputs, with their place in place of a tensor.
        packed: the graph's outputs.
        constants: tensors that it reads beside its inputs: their memory must stay what it is.
    """

    graph: Any
    into: list[tuple[list[Tensor], list[int]]]
    template: Any
    packed: _Packed
    constants: list[Tensor]

    @torch.no_grad()
    def repeat(self, leaves: list[Tensor]) -> TensorTree:
        """What the function returns for these inputs."""
        for copies, places in self.into:
            torch._foreach_copy_(copies, [leaves[place] for place in places])
        self.graph.replay()
        return filled(self.template, self.packed.copied())


class _Packed(NamedTuple):
    """The outputs of a graph, its single numbers packed together, so that few copies are made."""

    numbers: list[tuple[list[int], Tensor]]  # places of n numbers of one kind, the numbers [n]
    others: list[tuple[int, Tensor]]

    @classmethod
    def of(cls, outputs: list[Tensor]) -> _Packed:
        places: dict[torch.dtype, list[int]] = defaultdict(list)
        for place, x in enumerate(outputs):
            if not x.ndim:
                places[x.dtype].append(place)
        return cls(
            [(own, torch.stack([outputs[place] for place in own])) for own in places.values()],
            [(place, x) for place, x in enumerate(outputs) if x.ndim],
        )

    def copied(self) -> list[Tensor]:
        """The outputs, in memory of their own."""
        outputs = {place: x.clone() for place, x in self.others}
        for places, x in self.numbers:
            outputs.update(zip(places, x.clone().unbind(), strict=True))
        return [outputs[place] for place in range(len(outputs))]


class _DeviceWatch(Watch):  # type: ignore[no-untyped-call]
    """Also sees which tensors are read, and copies from the host, which no graph repeats.

    Attributes:
        read: ids of tensors that operations read.
        constants: those tensors that are no inputs, and whose memory no operation made.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.read: set[int] = set()
        self.constants: list[Tensor] = []
        self._made: list[Tensor] = []  # so that no other tensor gets the same memory
        self._memory = {x.untyped_storage().data_ptr() for x in inputs}

    def saw(self, func: Any, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        given = list(_tensors((args, kwargs)))
        made = list(_tensors(outputs))
        for x in given:
            if (memory := x.untyped_storage().data_ptr()) not in self._memory:
                self._memory.add(memory)
                self.constants.append(x)
        self._made += made
        self._memory.update(x.untyped_storage().data_ptr() for x in made)
        self.read.update(map(id, given))
        self.is_repeatable &= not any(
            one.device != other.device and (one.ndim or other.ndim or "copy" in func.name())
            for one in made
            for other in given
        )


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors among arguments."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        yield from _tensors(tuple(x.values()))
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _tensors(each)
