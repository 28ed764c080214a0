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

import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from google.protobuf.message import Message

from juggler.runtime.wire.chunks import Piece, write_chunk
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.forms import bytes_of, lay_out
from juggler.runtime.wire.trees import Tree

SHARED_MEMORY_VARIABLE = "JUGGLER_SHARED_MEMORY"
#: From this size on, a payload goes through shared memory: smaller ones cost less in a message.
LEAST_BYTES = 256 << 10

MOST_SLOTS = 16  # of a connection
_MOST_BYTES = 2 << 30  # of one memory: more than any payload
_PROBE = 0xFFFFFFFF  # the slot of the first memory
_PROOF_BYTES = 16
_OFFER, _SLOT, _DESCRIPTOR = struct.Struct("<IQ"), struct.Struct("<I"), struct.Struct("i")

_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which Python's fcntl lacks
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# With either of these, the memory's pages cannot be given back either (fallocate).
_FIXED_PAGES = fcntl.F_SEAL_WRITE | _SEAL_FUTURE_WRITE


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
        self._descriptor = os.memfd_create("juggler", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            self._mapped: mmap.mmap | None = mmap.mmap(self._descriptor, size)
            # Others that get the descriptor can only read it.
            self._seal(_FIXED_SIZE | _SEAL_FUTURE_WRITE)
        except BaseException:
            self.close()
            raise

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
        self._seal(fcntl.F_SEAL_WRITE)

    def hand_over(self, connection: socket.socket, slot: int) -> None:
        """Send the descriptor, into a slot.

        Raises:
            OSError: the reader is gone, or does not read.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(self._descriptor))
        connection.sendmsg([_OFFER.pack(slot, self.size)], [rights], socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Let go of it. Readers keep what they have mapped."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._mapped = -1, None

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()

    def _seal(self, seals: int) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)


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
        self._proof = secrets.token_bytes(_PROOF_BYTES)
        self._proved = False
        self._slots: dict[int, Memory | None] = {}  # own memory; None: somebody else's
        self._free: list[int] = []  # the one that was released last is at the end
        probe = Memory(mmap.PAGESIZE)
        probe.fill([memoryview(self._proof)])
        probe.hand_over(connection, _PROBE)
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
            elif len(said) == _SLOT.size and self._is_used(slot := _SLOT.unpack(said)[0]):
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
        except OSError:
            self._close()
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


class SharedFrame:
    """A frame for many readers, whose payload lies once in memory that nobody can change."""

    def __init__(self, header: Message, tree: Tree) -> None:
        form, pieces = lay_out(tree)
        self._header, self._tree = header.SerializeToString(), form.known.tree
        self._memory: Memory | None = None
        self._failed = False
        least = least_bytes()
        if least is not None and form.known.size >= least:
            try:
                self._memory = Memory(form.known.size)
            except OSError:  # there is no memory for it
                self._failed = True
            else:
                self._memory.fill(pieces)
                self._memory.freeze()

    def chunk(self, writer: Writer) -> bytes | None:
        """Its chunk for one reader; None: memory cannot be shared with it now."""
        if self._failed:
            writer.close()  # the reader tells people
        slot = None if self._memory is None else writer.lend(self._memory)
        if slot is None:
            return None
        return write_chunk((), 0, header=self._header, tree=self._tree, slot=slot)


class Reader:
    """The reader's end of a connection. One thread at a time may use it.

    Attributes:
        answered: whether it has answered the probe.
        why_not: why nothing is shared any more, for people; "": nothing went wrong.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.answered = False
        self.why_not = ""
        self._connection = connection
        self._mapped: dict[int, mmap.mmap] = {}  # by slot
        self._frozen: set[int] = set()  # slots of memory that is never filled again
        self._leased: set[int] = set()

    def hear(self) -> None:
        """Take what the writer has offered, and answer its probe.

        Raises:
            WireError: it offers what nobody should rely on.
        """
        while not self.why_not:
            try:
                # Python's recv_fds ignores this flag.
                said, rights, flags, _ = self._connection.recvmsg(
                    64, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:  # it left without reading all
                said, rights, flags = b"", [], 0
            except OSError as error:
                said, rights, flags = b"", [], 0
                self.why_not = f"{error.strerror}"
            descriptors = [_DESCRIPTOR.unpack(each)[0] for *_, each in rights]
            try:
                if not said:
                    self.why_not = self.why_not or "the other end shares nothing more"
                    return
                if len(said) != _OFFER.size or len(descriptors) != 1 or flags & socket.MSG_CTRUNC:
                    raise WireError("shared memory was offered without its descriptor")
                self._map(descriptors[0], *_OFFER.unpack(said))
            finally:
                for each in descriptors:
                    os.close(each)

    def wait_for_probe(self, seconds: float) -> None:
        """Wait until `hear` has something to answer."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.poll(1000 * seconds)

    def lease(self, slot: int, size: int) -> memoryview:
        """The first bytes of a slot, read-only. The writer is told when nothing refers to them any
        more.

        The writer can still change them, unless the memory is frozen: copy before checking.

        Raises:
            WireError: there is no such memory, or it is still being read.
        """
        self.hear()
        mapped = self._mapped.get(slot)
        if mapped is None:
            raise WireError(f"no memory was offered in slot {slot}")
        if slot in self._leased:
            raise WireError(f"the memory in slot {slot} is still being read")
        if size > len(mapped):
            raise WireError(f"{size} bytes do not fit slot {slot}, which has {len(mapped)}")
        self._leased.add(slot)
        root = np.ndarray(size, np.uint8, mapped)  # [size]
        # Views keep this array alive, whoever has them.
        weakref.finalize(root, self._release, slot).atexit = False
        return root.data.toreadonly()

    def close(self) -> None:
        """Let go of the memory. What is leased stays as long as something refers to it."""
        self._connection.close()
        self._mapped.clear()

    def _map(self, descriptor: int, slot: int, size: int) -> None:
        if slot >= MOST_SLOTS and slot != _PROBE:
            raise WireError(f"shared memory was offered in slot {slot} of {MOST_SLOTS}")
        if slot in self._leased:
            raise WireError(f"the memory in slot {slot} is still being read")
        frozen = _must_last(descriptor, size)
        try:
            mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise WireError(f"cannot map {size} bytes of shared memory: {error}") from error
        if slot != _PROBE:
            self._mapped[slot] = mapped
            (self._frozen.add if frozen else self._frozen.discard)(slot)
            return
        self.answered = True
        with mapped, suppress(OSError):
            self._connection.send(mapped[:_PROOF_BYTES], socket.MSG_DONTWAIT)

    def _release(self, slot: int) -> None:
        """Called in whatever thread has dropped the last reference, whatever locks it holds."""
        if slot in self._frozen:
            self._mapped.pop(slot, None)
        self._leased.discard(slot)
        # If the writer is gone, so is whoever would use the slot again.
        with suppress(OSError):
            self._connection.send(_SLOT.pack(slot), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _must_last(descriptor: int, size: int) -> bool:
    """Check that these bytes are there, and stay there whatever the writer does.

    Returns:
        Whether they even stay as they are.

    Raises:
        WireError: they may go, and whoever reads them would get a SIGBUS.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise WireError("what was offered is no memory that can be sealed") from None
    if seals & _FIXED_SIZE != _FIXED_SIZE or not seals & _FIXED_PAGES:
        raise WireError("shared memory is not sealed: it could vanish while it is read")
    found = os.fstat(descriptor)
    if not 0 < size <= min(found.st_size, _MOST_BYTES):
        raise WireError(f"shared memory of {found.st_size} bytes was offered as {size}")
    if found.st_blocks * 512 < size:
        raise WireError(f"shared memory of {size} bytes has only {found.st_blocks * 512}")
    return bool(seals & fcntl.F_SEAL_WRITE)
