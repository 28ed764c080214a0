"""Videos in a run's directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from juggler.runtime.plain_files import open_plain

_SUFFIX: Final = ".mp4"
_DEEPEST: Final = 3
_MOST: Final = 60  # the newest


@dataclass(frozen=True, slots=True)
class Video:
    """
    Attributes:
        video_id: by which it is asked for, since no path comes from a network.
        run_dir: the run's directory.
        name: within the run's directory.
        written: in seconds since 1970.
        size: in bytes.
    """

    video_id: str
    run_dir: Path
    name: str
    written: float
    size: int

    def open(self) -> BinaryIO:
        """Open the video without following links.

        Raises:
            OSError: the video or a directory above it is a link, or it cannot be read.
        """
        *directories, name = Path(self.name).parts
        place = os.open(self.run_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for each in directories:
                below = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
                os.close(place)
                place = below
            return open_plain(Path(name), dir_fd=place)
        finally:
            os.close(place)

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "id": self.video_id,
            "name": self.name,
            "written": self.written,
            "size": self.size,
        }


def find_videos(run_dir: Path) -> list[Video]:
    """The newest videos of a run, the newest first."""
    found = sorted(_walk(run_dir, run_dir, _DEEPEST), key=lambda video: video.written)
    return found[-_MOST:][::-1]


def _walk(run_dir: Path, directory: Path, depth: int) -> Iterator[Video]:
    with suppress(OSError), os.scandir(directory) as entries:
        for each in sorted(entries, key=lambda entry: entry.name):
            if each.is_dir(follow_symlinks=False) and depth:
                yield from _walk(run_dir, Path(each.path), depth - 1)
            elif each.name.endswith(_SUFFIX) and each.is_file(follow_symlinks=False):
                about = each.stat(follow_symlinks=False)
                name = str(Path(each.path).relative_to(run_dir))
                video_id = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:16]
                yield Video(video_id, run_dir, name, about.st_mtime, about.st_size)
