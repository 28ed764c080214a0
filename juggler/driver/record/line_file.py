"""Reads files of JSON lines that another process may be writing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_MOST_BYTES = 1 << 26  # read at once
_LONGEST_LINE = 1 << 24  # of more than that, no run writes one


class LineFile:
    """What comes in a file of lines, a part at a time: whole lines only.

    Attributes:
        restarts: how often the file has begun anew, because it was cut or is another one now.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self._place: tuple[int, int] = (0, 0)  # (device, inode)
        self._offset = 0

    def new_lines(self) -> list[bytes]:
        """The whole lines since the last call. If the file has begun anew, all of them.

        Raises:
            OSError: it cannot be read. FileNotFoundError: it is not there.
        """
        lines: list[bytes] = []
        if self.path.exists() and not self.path.is_file():  # opening a pipe would wait
            raise OSError(errno.EINVAL, "is not a file")
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            place = (found.st_dev, found.st_ino)
            if place != self._place or found.st_size < self._offset:
                self.restarts += self._offset > 0
                self._place, self._offset = place, 0
            file.seek(self._offset)
            while content := file.read(_MOST_BYTES):
                end = content.rfind(b"\n") + 1
                if not end and len(content) >= _LONGEST_LINE:
                    end = len(content)  # this is no file of lines
                if not end:
                    break
                lines += content[:end].splitlines()
                self._offset += end
                file.seek(self._offset)
        return lines
