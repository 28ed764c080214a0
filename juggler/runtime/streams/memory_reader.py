"""The reader's end of a connection over which memory is shared; see `shared_memory`."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import socket
import threading
import weakref
from contextlib import ExitStack, suppress

import numpy as np

from juggler.runtime.streams.shared_memory import (
    DESCRIPTOR,
    FIXED_PAGES,
    FIXED_SIZE,
    GET_SEALS,
    MOST_BYTES,
    MOST_SLOTS,
    OFFER,
    PROBE,
    PROOF_BYTES,
    SEAL_WRITE,
    SLOT,
    Memory,
    map_file,
)
from juggler.runtime.wire.errors import WireError


class Reader:
    """The reader's end of a connection. One thread at a time may use it.

    Args:
        connection: to the writer.
        hands_on: whether frozen memory is kept to be handed on, with a descriptor.

    Attributes:
        answered: whether it has answered the probe.
        why_not: why nothing is shared any more, for people; "": nothing went wrong.
        frozen: the memory that was leased last, to hand it on; None: it cannot be.
    """

    def __init__(self, connection: socket.socket, hands_on: bool = False) -> None:
        connection.setblocking(False)
        self.answered = False
        self.why_not = ""
        self.frozen: Memory | None = None
        self._connection, self._hands_on = connection, hands_on
        # `close` holds it, and `_release` in whatever thread: the connection's descriptor may be
        # another file's as soon as it is closed. The collector may call `_release` in a thread that
        # holds it already.
        self._ending = threading.RLock()
        self._mapped: dict[int, mmap.mmap] = {}  # by slot
        # By slot, until it is leased: nobody fills it again. None: it is not to be handed on.
        self._frozen: dict[int, Memory | None] = {}
        self._leased: set[int] = set()

    def hear(self) -> None:
        """Take what the writer has offered, and answer its probe.

        A correct writer has offered memory in each slot once at most since the last time. What
        there is beyond that waits, so that no writer holds up the thread by offering on and on.

        Raises:
            WireError: it offers what nobody should rely on.
        """
        for _ in range(MOST_SLOTS + 1):  # and the probe
            if self.why_not:
                return
            try:
                said, descriptors, whole = receive(self._connection, 64)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it left without reading all
                said, descriptors, whole = b"", [], True
            except OSError as error:
                said, descriptors, whole = b"", [], True
                self.why_not = f"{error.strerror}"
            try:
                if not said:
                    self.why_not = self.why_not or "the other end shares nothing more"
                    return
                if not whole:  # this process has no room for the descriptor
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                if len(said) != OFFER.size or len(descriptors) != 1:
                    raise WireError("shared memory was offered without its descriptor")
                self._map(descriptors[0], *OFFER.unpack(said))
            except OSError as error:
                self.why_not = f"{error.strerror}"
                with suppress(OSError):  # so that the writer offers no more
                    self._connection.shutdown(socket.SHUT_RDWR)
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
        if slot in self._leased:
            raise WireError(f"the memory in slot {slot} is still being read")
        mapped = self._mapped.get(slot)
        if mapped is None:
            raise WireError(
                f"there is no memory in slot {slot}: {self.why_not or 'none was offered'}"
            )
        if size > len(mapped):
            raise WireError(f"{size} bytes do not fit slot {slot}, which has {len(mapped)}")
        self._leased.add(slot)
        self.frozen = None
        if slot in self._frozen:
            self.frozen = self._frozen.pop(slot)
            del self._mapped[slot]
        root = np.ndarray(size, np.uint8, mapped)  # [size]
        # Views keep this array alive, whoever has them.
        weakref.finalize(root, self._release, slot).atexit = False
        return root.data.toreadonly()

    def close(self) -> None:
        """Let go of the memory. What is leased stays as long as something refers to it."""
        with self._ending:
            self._connection.close()
        self._mapped.clear()
        self._frozen.clear()
        self.frozen = None

    def _map(self, descriptor: int, slot: int, size: int) -> None:
        if slot >= MOST_SLOTS and slot != PROBE:
            raise WireError(f"shared memory was offered in slot {slot} of {MOST_SLOTS}")
        if slot in self._leased:
            raise WireError(f"the memory in slot {slot} is still being read")
        mapped, frozen = map_memory(descriptor, size)
        if slot != PROBE:
            self._mapped[slot] = mapped
            self._frozen.pop(slot, None)
            if frozen:
                self._frozen[slot] = self._to_hand_on(descriptor, size)
            return
        self.answered = True
        _must_have_room(descriptor)
        with mapped, suppress(OSError):
            self._connection.send(mapped[:PROOF_BYTES], socket.MSG_DONTWAIT)

    def _to_hand_on(self, descriptor: int, size: int) -> Memory | None:
        if self._hands_on:
            with suppress(OSError):  # if no descriptor is left, it can be read all the same
                return Memory.received(os.dup(descriptor), size)
        return None

    def _release(self, slot: int) -> None:
        """Called in whatever thread has dropped the last reference, whatever locks it holds."""
        self._leased.discard(slot)
        # If the writer is gone, so is whoever would use the slot again.
        with suppress(OSError), self._ending:
            self._connection.send(SLOT.pack(slot), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, most: int) -> tuple[bytes, list[int], bool]:
    """A message, the descriptors that came with it, and whether all of it is here.

    Raises:
        OSError: there is none, or the other end is gone.
    """
    # Python's recv_fds ignores this flag.
    said, rights, flags, _ = connection.recvmsg(
        most, socket.CMSG_LEN(DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = [DESCRIPTOR.unpack(each)[0] for *_, each in rights]
    return said, descriptors, not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)


def map_memory(descriptor: int, size: int) -> tuple[mmap.mmap, bool]:
    """Map memory that was offered, and tell whether it is frozen.

    Raises:
        WireError: nobody should rely on it.
        OSError: it cannot be mapped.
    """
    frozen = _must_last(descriptor, size)
    return map_file(descriptor, size, mmap.PROT_READ), frozen


def _must_have_room(descriptor: int) -> None:
    """Check that a descriptor may be kept for each slot: it is too late once a payload lies there.

    Raises:
        OSError: this process may not open so many more files.
    """
    with ExitStack() as held:
        for _ in range(MOST_SLOTS):
            held.callback(os.close, os.dup(descriptor))


def _must_last(descriptor: int, size: int) -> bool:
    """Check that these bytes are there, and stay there whatever the writer does.

    Returns:
        Whether the memory is frozen, so that their content is fixed too.

    Raises:
        WireError: they may go, and whoever reads them would get a SIGBUS.
    """
    try:
        seals = fcntl.fcntl(descriptor, GET_SEALS)
    except OSError:
        raise WireError("what was offered is no memory that can be sealed") from None
    if seals & FIXED_SIZE != FIXED_SIZE or not seals & FIXED_PAGES:
        raise WireError("shared memory is not sealed: it could vanish while it is read")
    found = os.fstat(descriptor).st_size
    # All of it: of a part, the blocks below might be missing, and others counted for them.
    if found != size or not 0 < size <= MOST_BYTES:
        raise WireError(f"shared memory of {found} bytes was offered as {size}")
    try:
        os.ftruncate(descriptor, size)  # blocks behind its end count, too: this gives them back
    except OSError as error:
        raise WireError(f"shared memory cannot be checked: {error.strerror}") from error
    there = os.fstat(descriptor).st_blocks * 512
    if there < size:
        raise WireError(f"shared memory of {size} bytes has only {there}")
    return bool(seals & SEAL_WRITE)
