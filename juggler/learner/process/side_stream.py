"""A stream of a device beside the one that updates run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """Orders copies to and from a device among its updates.

    Updates run on the stream that is the current one in any thread that says nothing else. What is
    copied here runs beside them, and waits for them, or they for it, only where that is asked for.
    The CPU has one order of things alone; there all of this means nothing.
    """

    def __init__(self, device: torch.device, backend: Any = None) -> None:
        """
        Args:
            device: whose stream it is.
            backend: the module of torch with that device's streams and events.
        """
        self._device = device
        self._backend = backend or torch.get_device_module(device)
        self.enter_thread()
        self._stream = self._backend.Stream()

    def enter_thread(self) -> None:
        """Have a thread allocate for this device, page-locked memory too."""
        self._backend.set_device(self._device)

    @contextmanager
    def working(self, after: Any = None) -> Iterator[None]:
        """What this thread asks of the device within goes onto this stream, behind an event."""
        with self._backend.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def mark(self) -> Any:
        """An event behind all that this thread's stream has been asked for so far."""
        # A thread that waits for it leaves its core to others.
        on_host = self._device.type == "cpu"
        event = self._backend.Event() if on_host else self._backend.Event(blocking=True)
        event.record(self._backend.current_stream())
        return event

    def give(self, sample: Any, copied: Any) -> None:
        """Let this thread's stream use tensors that were made on this one, once an event is over.
        Their memory is then not used for others before it is done with them."""
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
