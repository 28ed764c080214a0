"""Memory that two processes of one host share, in which the payload of a stream lies.

The writer makes anonymous memory (memfd) and hands its descriptor to the reader over a Unix socket
of its own; the chunk on the stream then has the number of the memory in place of the bytes. Memory
without a name is gone with the last process that holds it, however that process ends.

A connection has numbered slots. On it go, each as one message:

    writer → reader   (slot, size) and a descriptor: from now on, this memory is in the slot
    reader → writer   slot: nothing here reads that memory any more

The first memory of a connection is a probe: the reader answers with the bytes in it. So the writer
knows that the reader can map what it offers, before it relies on that.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from juggler.runtime.wire.chunks import Piece
from juggler.runtime.wire.forms import bytes_of

SHARED_MEMORY_VARIABLE = "JUGGLER_SHARED_MEMORY"
#: From this size on, a payload goes through shared memory: smaller ones cost less in a message.
LEAST_BYTES = 256 << 10

MOST_SLOTS = 16  # of a connection
MOST_BYTES = 2 << 30  # of one memory: more than any payload
PROBE = 0xFFFFFFFF  # the slot of the first memory
PROOF_BYTES = 16
OFFER, SLOT, DESCRIPTOR = struct.Struct("<IQ"), struct.Struct("<I"), struct.Struct("i")

# Linux's own numbers: a Python that was built with an old C library lacks some of their names.
GET_SEALS = 1034
_ADD_SEALS = 1033
_CLOSE_ON_EXEC, _ALLOW_SEALING = 0x1, 0x2
_SEAL_SHRINK, _SEAL_GROW, SEAL_WRITE, _SEAL_FUTURE_WRITE = 0x2, 0x4, 0x8, 0x10
FIXED_SIZE = _SEAL_SHRINK | _SEAL_GROW
# With either of these, the memory's pages cannot be given back either (fallocate).
FIXED_PAGES = SEAL_WRITE | _SEAL_FUTURE_WRITE


# Python's own mappings keep a duplicate of the descriptor unless they are told not to.
_WITHOUT_DUPLICATE: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def map_file(descriptor: int, size: int, protection: int) -> mmap.mmap:
    """
    Raises:
        OSError: it cannot be mapped, as where no descriptor is left.
    """
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection, **_WITHOUT_DUPLICATE)


def least_bytes() -> int | None:
    """The size from which a payload goes through shared memory; None: none does.

    Raises:
        ValueError: the variable says neither a size nor "off".
    """
    said = os.environ.get(SHARED_MEMORY_VARIABLE, "")
    if said == "off":
        return None
    if said and not said.isdecimal():
        raise ValueError(
            f"{SHARED_MEMORY_VARIABLE}={said}: it may be 'off', the number of bytes from which "
            "memory is shared, or not be set"
        )
    return int(said) if said else LEAST_BYTES


def memory_file(name: str, flags: int = 0) -> int:
    """The descriptor of a new file in memory (memfd), which is gone with its last descriptor.

    Args:
        name: for people who look into /proc.
        flags: those of memfd_create; 0: it stays open across `exec`.

    Raises:
        OSError: the system or this Python knows no such files.
    """
    make = getattr(os, "memfd_create", None)
    if make is None:  # it was built with a C library older than 2.27
        raise OSError(errno.ENOSYS, "this Python was built without os.memfd_create")
    descriptor: int = make(name, flags)
    return descriptor


class Memory:
    """New memory, which nobody can make smaller or larger.

    All of its pages are there from the start: if there is no memory for them, that is an OSError
    here, and not a signal (SIGBUS) to whoever writes or reads them.

    Attributes:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        """
        Raises:
            OSError: there is not so much memory, or the system does not know such memory.
        """
        self.size = size
        self._descriptor = memory_file("juggler", _CLOSE_ON_EXEC | _ALLOW_SEALING)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            both = mmap.PROT_READ | mmap.PROT_WRITE
            self._mapped: mmap.mmap | None = map_file(self._descriptor, size, both)
            # Others that get the descriptor can only read it.
            self._seal(FIXED_SIZE | _SEAL_FUTURE_WRITE)
        except BaseException:
            self.close()
            raise

    @classmethod
    def received(cls, descriptor: int, size: int) -> Memory:
        """Memory that another process made and froze, to hand it on. Takes the descriptor."""
        memory = cls.__new__(cls)
        memory.size, memory._descriptor, memory._mapped = size, descriptor, None
        return memory

    @classmethod
    def frozen(cls, pieces: Iterable[Piece], size: int) -> Memory:
        """New memory with a payload, which nobody can change.

        Raises:
            OSError: as for any new memory.
        """
        memory = cls(size)
        memory.fill(pieces)
        memory.freeze()
        return memory

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copy the pieces of a payload into it, from its start."""
        assert self._mapped is not None
        memory = np.frombuffer(self._mapped, np.uint8)  # [size]
        end = 0
        for piece in pieces:
            share = np.frombuffer(bytes_of(piece), np.uint8)
            start, end = end, end + len(share)
            memory[start:end] = share

    def freeze(self) -> None:
        """From now on, nobody can change its content."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        self._seal(SEAL_WRITE)

    def hand_over(self, connection: socket.socket, slot: int, chunk: bytes = b"") -> None:
        """Send the descriptor, into a slot.

        Args:
            connection: to the reader.
            slot: the number by which a chunk names it.
            chunk: that names it, if it goes along.

        Raises:
            OSError: the reader is gone, or does not read.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTOR.pack(self._descriptor))
        connection.sendmsg([OFFER.pack(slot, self.size), chunk], [rights], socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Let go of it. Readers keep what they have mapped."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._mapped = -1, None

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()

    def _seal(self, seals: int) -> None:
        fcntl.fcntl(self._descriptor, _ADD_SEALS, seals)
