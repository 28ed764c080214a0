"""`juggler new`: writes a small project that trains."""

from __future__ import annotations

import importlib.util
import keyword
import shlex
import sys
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import tyro

from juggler.cli.arguments import command
from juggler.driver.config import ConfigError
from juggler.driver.reporting.run_directory import RunDirectoryError

_NAME = "my_project"  # the name of the project in its template
_OTHERS = ("tests", "runs")  # directories of every project next to its package
#: Files that have other names in the template, because tools would use them.
_RENAMED = {"gitignore": ".gitignore"}


@dataclass(kw_only=True)
class Arguments:
    """Write a project that trains at once.

    It has an environment, a module, a configuration and a test, all commented, for you to change.
    """

    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIRECTORY")]
    """Directory to write. Its name becomes the package's: letters, digits and underscores."""


def _write(given: Arguments) -> int:
    directory = Path(given.directory)
    whole = directory.resolve()
    name = whole.name
    try:
        if _is_project(whole):
            raise RunDirectoryError(
                f"{directory} is already a project: `juggler train train.toml` trains in it"
            )
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise RunDirectoryError(f"{directory} already exists, and is not overwritten")
        _must_be_a_name(name)
        # Nothing is written before all of this was checked.
        for path in _copy(resources.files("juggler") / "templates" / "project", directory, name):
            print(path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {error.filename}: {error.strerror}") from error
    if outer := next(filter(_is_project, whole.parents), None):
        print(f"juggler new: {directory} is within another project, {outer}", file=sys.stderr)
    print(f"\ncd {shlex.quote(str(directory))}\njuggler train train.toml --run-dir runs/first")
    return 0


def _is_project(directory: Path) -> bool:
    """Return whether a directory looks like a project of `juggler new`."""
    package = directory / directory.name / "__init__.py"
    return (directory / "train.toml").is_file() and package.is_file()


def _copy(template: Traversable, to: Path, name: str) -> list[Path]:
    """Write a directory of the template under the project's name."""
    to.mkdir(parents=True, exist_ok=True)
    written = []
    for each in sorted(template.iterdir(), key=lambda each: each.name):
        path = to / _RENAMED.get(each.name, each.name.replace(_NAME, name))
        if each.is_dir():
            if each.name != "__pycache__":
                written += _copy(each, path, name)
        elif each.name.endswith((".py", ".toml", ".md", "gitignore")):
            path.write_text(each.read_text().replace(_NAME, name))
            written.append(path)
    return written


def _must_be_a_name(name: str) -> None:
    """Check that a package can have this new name."""
    if not name.isidentifier() or keyword.iskeyword(name):
        clean = "".join(each if each.isalnum() else "_" for each in name)
        raise ConfigError(
            f"{name!r} cannot be the name of a package: use letters, digits and underscores, "
            f"such as {clean if clean.isidentifier() and not keyword.iskeyword(clean) else _NAME!r}"
        )
    # Otherwise Python would find the other package first.
    spec = importlib.util.find_spec(name)
    if name in sys.stdlib_module_names or (spec is not None and spec.origin is not None):
        raise ConfigError(f"{name!r} is the name of another package: choose another one")
    if name in _OTHERS:
        raise ConfigError(f"{name!r} is the directory of the project's {name}: choose another name")


run = command("new", Arguments, _write)
