"""The writer's end of a connection over which memory is shared; see `shared_memory`."""

from __future__ import annotations

import mmap
import secrets
import socket
import threading
from collections.abc import Iterable

from google.protobuf.message import Message

from juggler.runtime.streams.shared_memory import (
    MOST_SLOTS,
    PROBE,
    PROOF_BYTES,
    SLOT,
    Memory,
    least_bytes,
)
from juggler.runtime.wire.chunks import Piece, write_chunk
from juggler.runtime.wire.forms import lay_out
from juggler.runtime.wire.trees import Tree


class Writer:
    """The writer's end of a connection.

    Attributes:
        why_not: why nothing is shared any more, for people; "": nothing went wrong.
    """

    def __init__(self, connection: socket.socket) -> None:
        """
        Raises:
            OSError: the probe cannot be sent.
        """
        connection.setblocking(False)
        self.why_not = ""
        self._connection = connection
        self._closed = False
        self._lock = threading.Lock()
        self._proof = secrets.token_bytes(PROOF_BYTES)
        self._proved = False
        self._slots: dict[int, Memory | None] = {}  # own memory; None: somebody else's
        self._free: list[int] = []  # the one that was released last is at the end
        probe = Memory(mmap.PAGESIZE)
        probe.fill([memoryview(self._proof)])
        probe.hand_over(connection, PROBE)
        probe.close()

    def place(self, pieces: Iterable[Piece], size: int) -> int | None:
        """Copy a payload into memory that nobody reads.

        Returns:
            Its slot; None: there is none, so the payload has to go inline.
        """
        with self._lock:
            slot = self._own_slot(size) if self._is_ready() else None
            memory = None if slot is None else self._slots[slot]
        if memory is not None:
            memory.fill(pieces)
        return slot

    def lend(self, memory: Memory) -> int | None:
        """Share memory that other connections share too.

        Returns:
            Its slot; None: it cannot be shared now.
        """
        with self._lock:
            if not self._is_ready():
                return None
            slot = self._free[-1] if self._free else len(self._slots)
            return slot if slot < MOST_SLOTS and self._offer(slot, memory, None) else None

    def close(self) -> None:
        with self._lock:
            self._close()

    def _is_ready(self) -> bool:
        """Hear what the reader has said, and tell whether it can map memory."""
        while not self._closed:
            try:
                said = self._connection.recv(64)
            except BlockingIOError:
                break
            except OSError:
                said = b""
            if not self._proved and said == self._proof:
                self._proved = True
            elif len(said) == SLOT.size and self._is_used(slot := SLOT.unpack(said)[0]):
                self._free.append(slot)
            elif said or not self._proved:
                self._fail("the other end cannot map it")
            else:  # the other end is gone, or about to
                self._close()
        return self._proved and not self._closed

    def _is_used(self, slot: int) -> bool:
        return slot in self._slots and slot not in self._free

    def _own_slot(self, size: int) -> int | None:
        """A slot that nobody reads, with memory for so many bytes."""
        for slot in reversed(self._free):  # the last one may still be in a cache
            memory = self._slots[slot]
            if memory is not None and memory.size >= size:
                self._free.remove(slot)
                return slot
        slot = len(self._slots) if len(self._slots) < MOST_SLOTS else min(self._free, default=-1)
        if slot < 0:
            return None
        try:
            memory = Memory(size + size // 8)  # the sizes of batches differ a little
        except OSError as error:
            self._fail(f"{error.strerror} for {size} bytes")
            return None
        return slot if self._offer(slot, memory, memory) else None

    def _offer(self, slot: int, memory: Memory, own: Memory | None) -> bool:
        try:
            memory.hand_over(self._connection, slot)
        except BlockingIOError:
            return False
        except ConnectionError:  # the reader is gone
            self._close()
            return False
        except OSError as error:  # as where too many descriptors are on their way
            self._fail(f"{error.strerror} for its descriptor")
            return False
        self._slots[slot] = own
        if slot in self._free:
            self._free.remove(slot)
        return True

    def _fail(self, why: str) -> None:
        self.why_not = why
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._connection.close()
        self._slots.clear()
        self._free.clear()


def freeze(header: Message, tree: Tree) -> tuple[bytes, Memory]:
    """A chunk and the memory that it names, in slot 0, with the payload.

    Raises:
        OSError: there is no memory for it.
        WireError: the tree has something that cannot be sent.
    """
    form, pieces = lay_out(tree)
    memory = Memory.frozen(pieces, form.known.size)
    encoded = header.SerializeToString()
    return write_chunk((), 0, header=encoded, tree=form.known.tree, slot=0), memory


class FrozenFrame:
    """A frame for many readers, whose payload lies once in memory that nobody can change."""

    def __init__(self, header: Message, tree: Tree) -> None:
        form, pieces = lay_out(tree)
        self._header, self._tree = header.SerializeToString(), form.known.tree
        self._memory: Memory | None = None
        self._failed = False
        least = least_bytes()
        if least is not None and form.known.size >= least:
            try:
                self._memory = Memory.frozen(pieces, form.known.size)
            except OSError:  # there is no memory for it
                self._failed = True

    def chunk(self, writer: Writer) -> bytes | None:
        """Its chunk for one reader; None: memory cannot be shared with it now."""
        if self._failed:
            writer.close()  # the reader tells people
        slot = None if self._memory is None else writer.lend(self._memory)
        if slot is None:
            return None
        return write_chunk((), 0, header=self._header, tree=self._tree, slot=slot)
