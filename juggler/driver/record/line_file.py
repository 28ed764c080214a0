"""Reads files of JSON lines that another process may be writing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

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
        found = self.path.stat()
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
        if not self.path.is_file():  # opening a pipe would wait
            raise OSError(errno.EINVAL, "is not a file")
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._place:
                return  # it was replaced at this moment
            file.seek(self._offset)
            while part := file.read(_PART):
                end = part.rfind(b"\n") + 1 or (len(part) if len(part) == _PART else 0)
                if not end:
                    return  # half a line
                self._offset += end
                yield from part[:end].splitlines()
                file.seek(self._offset)
