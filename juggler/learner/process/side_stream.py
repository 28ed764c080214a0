"""SideStream: a stream of a device beside the one for updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """A stream for copies to and from a device.

    Updates run on the default stream. Copies on this stream run beside them, and the two wait for
    each other only where a method below says so. On the CPU, all of this does nothing.
    """

    def __init__(self, device: torch.device, backend: Any = None) -> None:
        """
        Args:
            device: the device of the stream.
            backend: the torch module with the device's streams and events, such as torch.cuda.
        """
        self._device = device
        self._backend = backend or torch.get_device_module(device)
        self.enter_thread()
        self._stream = self._backend.Stream()

    def enter_thread(self) -> None:
        """Prepare this thread to allocate on the device, and page-locked memory."""
        self._backend.set_device(self._device)

    @contextmanager
    def working(self, after: Any = None) -> Iterator[None]:
        """Within this context, the thread's work goes onto this stream, after an event."""
        with self._backend.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def mark(self) -> Any:
        """An event after all work that was issued on this thread's current stream."""
        # blocking: a thread that waits for it sleeps.
        on_host = self._device.type == "cpu"
        event = self._backend.Event() if on_host else self._backend.Event(blocking=True)
        event.record(self._backend.current_stream())
        return event

    def give(self, sample: Any, copied: Any) -> None:
        """Let this thread's current stream use tensors that were made on this stream, after an
        event. Their memory is not reused before that stream is done with them."""
        stream = self._backend.current_stream()
        stream.wait_event(copied)
        for tensor in _leaves(sample):
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    else:
        for branch in tree.values():
            yield from _leaves(branch)
