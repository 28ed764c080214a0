"""Reads files of JSON lines that another process may be writing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from juggler.runtime.plain_files import open_plain

_PART = 1 << 23  # bytes that are read at once: no run writes a line as long


class LineFile:
    """What comes in a file of lines, each whole line once.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place: tuple[int, int] | None = None  # (device, inode)
        self._offset = 0

    def begins_anew(self) -> bool:
        """Whether the file was cut, or is another one now. Its lines then come from the start.

        Raises:
            OSError: it cannot be read. FileNotFoundError: it is not there.
        """
        found = os.lstat(self.path)
        place = (found.st_dev, found.st_ino)
        if place == self._place and found.st_size >= self._offset:
            return False
        had_lines = self._offset > 0
        self._place, self._offset = place, 0
        return had_lines

    def new_lines(self) -> Iterator[bytes]:
        """The whole lines since the last call. Ask `begins_anew` first.

        Raises:
            OSError: as above.
        """
        with open_plain(self.path) as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._place:
                return  # it was replaced at this moment
            while part := self._next_part(file):
                end = part.rfind(b"\n") + 1 or (len(part) if len(part) == _PART else 0)
                if not end:
                    return  # half a line
                self._offset += end
                yield from part[:end].splitlines()

    def _next_part(self, file: BinaryIO) -> bytes:
        """Read the next part. Skip holes: a sparse file may claim terabytes."""
        try:
            self._offset = os.lseek(file.fileno(), self._offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data follows
                return b""
        return os.pread(file.fileno(), _PART, self._offset)
