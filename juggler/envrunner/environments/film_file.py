"""Writes a video file with ffmpeg."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import IO

from imageio_ffmpeg import get_ffmpeg_exe

from juggler.envrunner.failures import FilmFailed


class FilmFile:
    """A video that is being encoded. Its file is there when it is whole, and not before: ffmpeg
    writes to a file without a name, of which nothing is left where this process is killed.

    Args:
        path: of the file, in MP4.
        width: of the images.
        height: likewise.
        fps: images per second.
    """

    def __init__(self, path: Path, width: int, height: int, fps: float) -> None:
        self._path = path
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._video: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        rate = str(Fraction(fps).limit_denominator())
        images = [*f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {rate}".split(), "-i", "-"]
        # Most players know no other format of pixels, and with it sides have to be even.
        size = f"scale={width + width % 2}:{height + height % 2}"
        video = ["-an", "-vf", size, "-pix_fmt", "yuv420p", "-f", "mp4"]
        # In a session of its own, since a terminal sends Ctrl-C to all processes of one. Such a
        # start does not fork: where gRPC was imported before Juggler, gRPC's fork handlers have
        # ended ffmpeg before it could start.
        self._process = subprocess.Popen(
            [
                get_ffmpeg_exe(),
                "-v",
                "error",
                *images,
                *video,
                "-y",
                f"/dev/fd/{self._video.fileno()}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
            pass_fds=[self._video.fileno()],
            start_new_session=True,
        )

    def add(self, image: bytes) -> None:
        """Add an image, [height, width, 3] of uint8.

        Raises:
            FilmFailed: ffmpeg has failed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(image)
        except BrokenPipeError:
            self.finish()  # says what ffmpeg has said

    def finish(self) -> None:
        """Encode what is left, and write the file.

        Raises:
            FilmFailed: ffmpeg has failed, or the file cannot be written. Then there is none.
        """
        part = self._path.with_name(f".{self._path.name}.part")
        with self._words, self._video:
            self._process.communicate()
            if self._process.returncode:
                self._words.seek(0)
                said = self._words.read().decode(errors="replace").strip().splitlines()
                why = said[-1] if said else f"it ended with status {self._process.returncode}"
                raise FilmFailed(f"the video {self._path} could not be encoded by ffmpeg: {why}")
            self._video.seek(0)
            try:
                with part.open("wb") as file:
                    shutil.copyfileobj(self._video, file)
                part.replace(self._path)
            except OSError as error:
                with suppress(OSError):
                    part.unlink()
                why = error.strerror or str(error)
                raise FilmFailed(f"the video {self._path} could not be written: {why}") from error
