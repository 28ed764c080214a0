"""How many workers are wanted in a run that was launched: files that everybody can change."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from juggler.launch.commands import ROLES, LaunchError
from juggler.launch.following import ask
from juggler.runtime.actors.ownership import is_ours_alone
from juggler.runtime.file_locks import try_lock
from juggler.runtime.plain_files import open_plain, read_plain

#: In a command that scales: the number that is wanted.
NUMBER = "{number}"

_MOST_BYTES = 64  # of a file with a number


@dataclass(frozen=True, slots=True)
class Wanted:
    """The numbers of workers that are wanted, in one file for each role.

    A process that reads them holds a lock on one more file, so that others know whether it is
    there.

    Attributes:
        directory: of the launch.
    """

    directory: Path

    def path(self, role: str) -> Path:
        return self.directory / f"{role}.count"

    @property
    def are_there(self) -> bool:
        """Whether the run goes on."""
        return all(self.path(role).is_file() for role in ROLES)

    @contextmanager
    def read_here(self) -> Iterator[None]:
        """This process reads the files, and removes them at the end.

        Raises:
            LaunchError: another process does, or the disk refuses.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.fdopen(os.open(self._reader, flags, 0o666), "w")
        except OSError as error:
            raise LaunchError(f"cannot write {self._reader}: {error.strerror}") from error
        with file:
            if try_lock(file) is False:
                said = f"another `juggler launch` has started the run of {self.directory} already"
                raise LaunchError(said)
            try:
                yield
            finally:
                self.forget()

    @property
    def abandoned(self) -> bool:
        """Whether the process that should read the files is gone."""
        try:
            with open_plain(self._reader) as file:
                return try_lock(file, shared=True) is True
        except OSError:  # without a reader process, the engine reads the files
            return False

    @property
    def _reader(self) -> Path:
        return self.directory / "reader.lock"

    def begin(self, role: str, number: int, scale: Sequence[str] = ()) -> None:
        """Note what a run begins with.

        Args:
            role: of the workers.
            number: of them.
            scale: the words of a command that makes them `NUMBER`; (): somebody reads the files.

        Raises:
            LaunchError: the disk refuses.
        """
        path = self._scale(role)
        path.unlink(missing_ok=True)
        if scale:
            _write_new(path, json.dumps(list(scale)))
            path.chmod(0o644)  # even with a strict umask, because `change` runs it
        self._write(role, number)

    def _scale(self, role: str) -> Path:
        return self.directory / f"{role}.scale"

    def _write(self, role: str, number: int) -> None:
        new = self.path(role).with_suffix(".new")
        try:
            _write_new(new, f"{number}\n")
            new.rename(self.path(role))
        except OSError as error:
            raise LaunchError(f"cannot write {self.path(role)}: {error.strerror}") from error

    def read(self, role: str) -> int:
        """
        Raises:
            LaunchError: there is no number.
        """
        try:
            return int(read_plain(self.path(role), _MOST_BYTES))
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot read {self.path(role)}: {error}") from error

    def change(self, role: str, number: int) -> str:
        """Want another number -> what to tell people.

        Raises:
            LaunchError: the files cannot be read or written, or the engine refuses.
        """
        before = self.read(role)
        if words := self._command(role):
            command = [word.replace(NUMBER, str(number)) for word in words]
            ask(*command, advice="scale the run where it was launched")
        self._write(role, number)
        return f"{role}: {number} are wanted now, in place of {before}"

    def _command(self, role: str) -> list[str]:
        """Read the words of a role's scaling command; []: no command."""
        path = self._scale(role)
        try:
            with open_plain(path) as file:
                if not is_ours_alone(os.fstat(file.fileno())):
                    raise LaunchError(
                        f"{path} has a command that another user may have written: scale the run "
                        "as the user that launched it, and deny others to write there (chmod go-w)"
                    )
                words = json.load(file)
                if not isinstance(words, list):
                    raise LaunchError(f"{path} holds no command: launch the run again")
                return [str(word) for word in words]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot read {path}: {error}") from error

    def forget(self) -> None:
        """Remove the files: the run is over."""
        for role in ROLES:
            self.path(role).unlink(missing_ok=True)
        self._reader.unlink(missing_ok=True)


def _write_new(path: Path, text: str) -> None:
    """Write a file that replaces one of an earlier attempt; never follow a link.

    Raises:
        OSError: the disk refuses, or another process was faster.
    """
    path.unlink(missing_ok=True)
    with path.open("x") as file:
        file.write(text)


def shared_out(total: int, weights: Sequence[int]) -> list[int]:
    """Share a number out in proportion to weights, by largest remainders.

    Args:
        total: to share out.
        weights: at least one of them is not 0; those of 0 get nothing.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(each) for each in exact]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares
