"""How many workers are wanted in a run that was launched: files that everybody can change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from juggler.launch.commands import LaunchError
from juggler.launch.following import ask

#: In a command that scales: the number that is wanted.
NUMBER = "{number}"
ROLES = ("learner", "envrunner")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The numbers of workers that are wanted, in one file for each role.

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

    def begin(self, role: str, number: int, scale: Sequence[str] = ()) -> None:
        """Note what a run begins with.

        Args:
            role: of the workers.
            number: of them.
            scale: the words of a command that makes them `NUMBER`; (): somebody reads the files.

        Raises:
            LaunchError: the disk refuses.
        """
        self._scale(role).unlink(missing_ok=True)
        if scale:
            self._scale(role).write_text(json.dumps(list(scale)))
        self._write(role, number)

    def _scale(self, role: str) -> Path:
        return self.directory / f"{role}.scale"

    def _write(self, role: str, number: int) -> None:
        new = self.path(role).with_suffix(".new")
        try:
            new.write_text(f"{number}\n")
            new.rename(self.path(role))
        except OSError as error:
            raise LaunchError(f"cannot write {self.path(role)}: {error.strerror}") from error

    def read(self, role: str) -> int:
        """
        Raises:
            LaunchError: there is no number.
        """
        try:
            return int(self.path(role).read_text())
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot read {self.path(role)}: {error}") from error

    def change(self, role: str, number: int) -> str:
        """Want another number -> what to tell people.

        Raises:
            LaunchError: the files cannot be read or written, or the engine refuses.
        """
        before = self.read(role)
        if self._scale(role).exists():
            words = json.loads(self._scale(role).read_text())
            command = [str(word).replace(NUMBER, str(number)) for word in words]
            ask(*command, advice="scale the run where it was launched")
        self._write(role, number)
        return f"{role}: {number} are wanted now, in place of {before}"

    def forget(self) -> None:
        """Remove the files: the run is over."""
        for role in ROLES:
            self.path(role).unlink(missing_ok=True)


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
