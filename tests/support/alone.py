"""Python environments with Juggler and its dependencies only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BUILT_FROM = [
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "client",
    "examples",
    "juggler",
    "proto",
    "pyproject.toml",
]


def copy_of_the_checkout(to: Path) -> Path:
    """What Juggler is built from: building writes beside the sources."""
    to.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "build", "node_modules")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, to)
    return to


def install_juggler(wheel: Path, directory: Path) -> None:
    """What a plain `pip install` of this wheel brings, and pip itself.

    All but Juggler are links to what is installed here: torch by itself is most of a gigabyte.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    only = ["--no-deps", "--no-compile", "--target", directory]
    subprocess.run([*pip, "install", *only, wheel], check=True, timeout=300)
    for each in {found.name: found for found in _needed(["juggler", "pip"])}.values():
        if each.name == "juggler":
            continue
        for path in each.files or ():
            if path.parts[0] == "..":
                continue  # a command
            link = directory / path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(str(each.locate_file(path)))


def _needed(names: Iterable[str]) -> Iterator[Distribution]:
    seen = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        found = distribution(wanted.name)
        yield found
        for requirement in map(Requirement, found.requires or ()):
            extras = wanted.extras or {""}
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(requirement)


class Alone:
    """An environment with Juggler.

    Args:
        path: where it is made.
        installed: what `install_juggler` has filled.
    """

    def __init__(self, path: Path, installed: Path) -> None:
        self.path = path
        self.python = path / "venv" / "bin" / "python"
        venv.create(path / "venv", symlinks=True)
        (site,) = (path / "venv" / "lib").glob("python*/site-packages")
        (site / "installed.pth").write_text(f"{installed}\n")

    def variables(self) -> dict[str, str]:
        """Of the programs that run in it."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {
            **kept,
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def try_to_run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """A Python program."""
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            cwd=self.path,
            env=self.variables(),
            capture_output=True,
            text=True,
            timeout=600,
        )

    def run(self, *arguments: object) -> str:
        done = self.try_to_run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
