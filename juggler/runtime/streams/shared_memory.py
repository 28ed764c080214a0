"""Memory of one host that holds the payload of a stream.

The writer makes anonymous memory (memfd) and passes its descriptor to the reader over a separate
Unix socket; the chunk on the stream then has the number of the memory instead of the bytes.
Anonymous memory disappears with the last process that holds it, even if that is killed.

A connection has numbered slots. Its messages are:

    writer → reader   (slot, size) and a descriptor: from now on, this memory is in the slot
    reader → writer   slot: nothing here reads that memory any more

The first memory of a connection is a probe, which the reader releases at once. So the writer knows
that the reader can map memory before it relies on that.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from google.protobuf.message import Message

from juggler.runtime.wire.chunks import Piece, write_chunk
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import bytes_of, lay_out
from juggler.runtime.wire.trees import Tree

SHARED_MEMORY_VARIABLE = "JUGGLER_SHARED_MEMORY"
#: From this size on, a payload uses shared memory: smaller ones are cheaper in a message.
LEAST_BYTES = 256 << 10

MOST_SLOTS = 16  # of a connection
PROBE = 0xFFFFFFFF  # the slot of the first memory
OFFER, SLOT, DESCRIPTOR = struct.Struct("<IQ"), struct.Struct("<I"), struct.Struct("i")

# Linux's own numbers: a Python built with an old C library does not have all of their names.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_CLOSE_ON_EXEC, _ALLOW_SEALING = 0x1, 0x2
_SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE, _SEAL_FUTURE_WRITE = 0x2, 0x4, 0x8, 0x10

# Python's own mappings keep a duplicate of the descriptor by default.
_WITHOUT_DUPLICATE: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def map_file(descriptor: int, size: int, protection: int) -> mmap.mmap:
    """Map a file; raise OSError if that is impossible."""
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection, **_WITHOUT_DUPLICATE)


def least_bytes() -> int | None:
    """Return the size from which a payload uses shared memory; None: never.

    Raises:
        ValueError: the variable is neither a size nor "off".
    """
    message = os.environ.get(SHARED_MEMORY_VARIABLE, "")
    if message == "off":
        return None
    if message and not message.isdecimal():
        raise ValueError(
            f"{SHARED_MEMORY_VARIABLE}={message}: it may be 'off', the number of bytes from which "
            "memory is shared, or not be set"
        )
    return int(message) if message else LEAST_BYTES


def memory_file(name: str, flags: int = 0) -> int:
    """Open a new file in memory (memfd); return its descriptor.

    Args:
        name: as shown in /proc.
        flags: flags of memfd_create; 0: it stays open across `exec`.

    Raises:
        OSError: the system or this Python has no such files.
    """
    make = getattr(os, "memfd_create", None)
    if make is None:  # built with a C library older than 2.27
        raise OSError(errno.ENOSYS, "this Python was built without os.memfd_create")
    descriptor: int = make(name, flags)
    return descriptor


class SharedMemory:
    """Memory of a fixed size.

    All pages of new memory are allocated at once: too little memory is an OSError here instead of a
    signal (SIGBUS) to a writer or reader.

    Attributes:
        size: in bytes.
    """

    def __init__(self, size: int, descriptor: int = -1) -> None:
        """Allocate memory of this size, or take another process's descriptor.

        Raises:
            OSError: memory is too small, or the system does not support memfd.
        """
        self.size, self._descriptor = size, descriptor
        self._mapped: mmap.mmap | None = None
        if descriptor >= 0:
            return
        self._descriptor = memory_file("juggler", _CLOSE_ON_EXEC | _ALLOW_SEALING)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            both = mmap.PROT_READ | mmap.PROT_WRITE
            self._mapped = map_file(self._descriptor, size, both)
            # Other processes with the descriptor can only read it.
            self._seal(_SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE)
        except BaseException:
            self.close()
            raise

    def map_read_only(self) -> mmap.mmap:
        """Map the memory; raise OSError or ValueError if that is impossible."""
        return map_file(self._descriptor, self.size, mmap.PROT_READ)

    def is_frozen(self) -> bool:
        """Return whether no process can change the content."""
        return bool(fcntl.fcntl(self._descriptor, _GET_SEALS) & _SEAL_WRITE)

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copy the pieces of a payload into the memory, from its start."""
        assert self._mapped is not None
        memory = np.frombuffer(self._mapped, np.uint8)  # [size]
        end = 0
        for piece in pieces:
            share = np.frombuffer(bytes_of(piece), np.uint8)
            start, end = end, end + len(share)
            memory[start:end] = share

    def freeze(self) -> None:
        """Make the content read-only for all processes."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        self._seal(_SEAL_WRITE)

    def hand_over(self, connection: socket.socket, slot: int, chunk: bytes = b"") -> None:
        """Send the descriptor, into a slot.

        Args:
            connection: to the reader.
            slot: the number of the memory in a chunk.
            chunk: the chunk that names it, if sent along.

        Raises:
            OSError: the reader is gone, or does not read.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTOR.pack(self._descriptor))
        connection.sendmsg([OFFER.pack(slot, self.size), chunk], [rights], socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Release the memory; readers keep their mappings."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._mapped = -1, None

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()

    def _seal(self, seals: int) -> None:
        fcntl.fcntl(self._descriptor, _ADD_SEALS, seals)


class SharedMemoryReader:
    """The reader's end of a connection.

    One thread at a time may use it.

    Args:
        connection: to the writer.

    Attributes:
        answered: whether it has answered the probe.
        why_not: why nothing is shared any more, for people; "": no problem.
        frozen: the memory that was leased last, for a relay; None: impossible.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.answered = False
        self.why_not = ""
        self.frozen: SharedMemory | None = None
        self._connection = connection
        # Held by `close`, and by `_release` in any thread: a closed descriptor may at once belong
        # to another file. Reentrant, because the collector may call `_release` in a thread that
        # already holds it.
        self._ending = threading.RLock()
        self._mapped: dict[int, mmap.mmap] = {}  # by slot
        self._frozen: dict[int, SharedMemory] = {}  # by slot, until it is leased

    def receive_offers(self) -> None:
        """Map memory that the writer has offered, and answer its probe."""
        while not self.why_not:
            # The stream survives an error here: later payloads come inline.
            try:
                message, memory = receive(self._connection, OFFER.size)
                self._map(OFFER.unpack(message)[0], memory)
            except BlockingIOError:
                return
            except ConnectionResetError:
                self.why_not = "the other end shares no more memory"
            except (OSError, ValueError, struct.error) as error:
                self.why_not = f"{getattr(error, 'strerror', None) or error}"
                with suppress(OSError):  # so that the writer offers nothing more
                    self._connection.shutdown(socket.SHUT_RDWR)

    def wait_for_probe(self, seconds: float) -> None:
        """Wait until `receive_offers` has something to answer."""
        wait([self._connection], seconds)

    def lease(self, slot: int, size: int) -> memoryview:
        """Lend the first bytes of a slot, read-only.

        The writer reuses them when nothing refers to them any more.

        Raises:
            WireError: there is no such memory.
        """
        self.receive_offers()
        mapped = self._mapped.get(slot)
        if mapped is None or size > len(mapped):
            why = self.why_not or (f"it has {len(mapped)}" if mapped else "none was offered")
            raise WireError(f"there is no memory of {size} bytes in slot {slot}: {why}")
        self.frozen = self._frozen.pop(slot, None)
        if self.frozen is not None:  # its writer fills it no more
            del self._mapped[slot]
        root = np.ndarray(size, np.uint8, mapped)  # [size]
        # Views keep this array alive.
        weakref.finalize(root, self._release, slot).atexit = False
        return root.data.toreadonly()

    def close(self) -> None:
        """Close the memory.

        Leased memory stays as long as something refers to it.
        """
        with self._ending:
            self._connection.close()
        self._mapped.clear()
        self._frozen.clear()
        self.frozen = None

    def _map(self, slot: int, memory: SharedMemory | None) -> None:
        if memory is None:  # this process has no free descriptor
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        mapped = memory.map_read_only()
        if slot == PROBE:
            self.answered = True
            return self._release(slot)
        self._mapped[slot] = mapped
        self._frozen.pop(slot, None)
        if memory.is_frozen():
            self._frozen[slot] = memory
        return None

    def _release(self, slot: int) -> None:
        """Note that the last reference was dropped.

        Any thread may call this, with any locks held.
        """
        # If the writer is gone, the slot will not be used again.
        with suppress(OSError), self._ending:
            self._connection.send(SLOT.pack(slot), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, most: int) -> tuple[bytes, SharedMemory | None]:
    """Receive a message, and the memory that it offers.

    Raises:
        BlockingIOError: there is no message.
        ConnectionResetError: the other end is gone.
        OSError: as for `recvmsg`.
    """
    # Python's recv_fds ignores this flag.
    message, rights, _, _ = connection.recvmsg(
        most, socket.CMSG_LEN(DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    )
    if not message:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    if not rights:
        return message, None
    (descriptor,) = DESCRIPTOR.unpack(rights[0][2])
    return message, SharedMemory(OFFER.unpack_from(message)[1], descriptor)


class SharedMemoryWriter:
    """The writer's end of a connection.

    Attributes:
        why_not: why nothing is shared any more, for people; "": no problem.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Raise OSError if the probe cannot be sent."""
        connection.setblocking(False)
        self.why_not = ""
        self._connection = connection
        self._closed = False
        self._lock = threading.Lock()
        self._proved = False  # the reader has mapped the probe
        self._slots: dict[int, SharedMemory | None] = {}  # own memory; None: the other end's
        self._free: list[int] = []  # released most recently at the end
        probe = SharedMemory(mmap.PAGESIZE)
        probe.hand_over(connection, PROBE)
        probe.close()

    def place(self, pieces: Iterable[Piece], size: int) -> int | None:
        """Copy a payload into unread memory.

        Returns:
            Its slot; None: no memory, so the payload has to be sent inline.
        """
        with self._lock:
            slot = self._own_slot(size) if self._is_ready() else None
            memory = None if slot is None else self._slots[slot]
        if memory is not None:
            memory.fill(pieces)
        return slot

    def lend(self, memory: SharedMemory) -> int | None:
        """Share memory that other connections also share.

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
        """Read the reader's messages; return whether it can map memory."""
        while not self._closed:
            try:
                message = self._connection.recv(64)
            except BlockingIOError:
                break
            except OSError:
                message = b""
            # A reader that can map memory returns the probe first.
            if message and (slot := SLOT.unpack(message)[0]) != PROBE:
                self._free.append(slot)
            elif message:
                self._proved = True
            elif self._proved:  # the other end is gone, or closing
                self._close()
            else:
                self._fail("the other end cannot map it")
        return self._proved and not self._closed

    def _own_slot(self, size: int) -> int | None:
        """Return a slot without readers, with memory for this many bytes."""
        for slot in reversed(self._free):  # the most recent may still be cached
            memory = self._slots[slot]
            if memory is not None and memory.size >= size:
                self._free.remove(slot)
                return slot
        slot = len(self._slots) if len(self._slots) < MOST_SLOTS else min(self._free, default=-1)
        if slot < 0:
            return None
        try:
            memory = SharedMemory(size + size // 8)  # the sizes of batches differ a little
        except OSError as error:
            self._fail(f"{error.strerror} for {size} bytes")
            return None
        return slot if self._offer(slot, memory, memory) else None

    def _offer(self, slot: int, memory: SharedMemory, own: SharedMemory | None) -> bool:
        try:
            memory.hand_over(self._connection, slot)
        except BlockingIOError:
            return False
        except ConnectionError:  # the reader is gone
            self._close()
            return False
        except OSError as error:  # for example, too many descriptors in flight
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


class FrozenFrame:
    """A frame for many readers, in memory that cannot change.

    Attributes:
        memory: has the payload.

    Raises:
        OSError: too little memory.
        WireError: the tree has a value that cannot be sent.
    """

    def __init__(self, header: Message, tree: Tree) -> None:
        form, pieces = lay_out(tree)
        self.memory = SharedMemory(form.size)
        self.memory.fill(pieces)
        self.memory.freeze()
        self._header, self._tree = header.SerializeToString(), form.tree

    def chunk(self, slot: int) -> bytes:
        """Return the chunk for a reader with the memory in this slot."""
        return write_chunk(header=self._header, tree=self._tree, slot=slot)
