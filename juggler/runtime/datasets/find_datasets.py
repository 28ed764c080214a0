"""Finds Minari data sets and reads their metadata without Minari."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

from juggler.runtime.checkpoints.checkpoint import DIRECTORY, newest_first
from juggler.runtime.install_commands import installing
from juggler.runtime.near_matches import all_of, closest, listed, one_of

#: Within the directory of a data set.
DATA: Final = "data"
METADATA: Final = "metadata.json"
#: Names of a data set's parts within its directory: each EnvRunner of a run writes its own part.
PARTS: Final = "envrunner-*-part-*-v0"
#: Maximum number of directories searched for a data set with a similar name.
_MOST_LOOKED_AT: Final = 10_000


class DatasetError(ValueError):
    """A data set is missing, damaged, or does not fit."""


def must_be_installed() -> None:
    """Raise DatasetError if a package for writing data sets is missing."""
    for name in ("minari", "h5py"):
        if find_spec(name) is None:
            raise DatasetError(
                f"writing a data set needs the package {name}: {installing('datasets')}"
            )


def find_dataset(name: str) -> list[Path]:
    """Return the directories of a data set: one, or its parts.

    Args:
        name: its directory, or its name among Minari's data sets on this host.

    Raises:
        DatasetError: there is no such data set; names the nearest one.
    """
    path, kept = Path(name).expanduser(), _minari_directory()
    for directory in (path, kept / name):
        if places := _places_in(directory):
            return places
    if path.exists():
        raise DatasetError(f"{name} is not a Minari data set: {_instead(path, Path(name))}")
    near = _nearest_path(Path(name)) or closest(name, _names_in(kept))
    raise DatasetError(
        f"there is no data set {name!r}, neither as a directory nor in Minari's directory "
        f"{kept}: "
        + (f"did you mean {near!r}?" if near else "give the path of its directory")
        + _unfinished(path.parent, path.name)
    )


def _instead(path: Path, name: Path) -> str:
    """Suggest what to name if something is not a data set.

    Args:
        path: its path.
        name: as it was given.
    """
    there = sorted(islice(path.glob("*"), _MOST_LOOKED_AT))
    if found := [str(name / each.name) for each in there if _is_one(each)]:
        return f"did you mean {listed(found, one_of)}?"
    if (path / DIRECTORY).is_dir() and newest_first(path / DIRECTORY):
        return (
            f"it is the directory of a run, and `juggler record {name}` makes a data set with its "
            "policy"
        )
    return (
        f"it has no file {DATA}/{METADATA}, and no parts that a run with record = ... has "
        f"completed{_unfinished(path, PARTS)}"
    )


def read_metadata(data: Path) -> dict[str, Any]:
    """Read a data set's metadata.

    Args:
        data: from `find_dataset`.

    Raises:
        DatasetError: its file is damaged or incomplete.
    """
    file = data / METADATA
    try:
        metadata = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} is damaged: {error}") from error
    # A data set gets its name last. Minari would make the environment to find its spaces, and so
    # run code that the file names.
    needed = ("observation_space", "action_space", "dataset_id", "total_episodes")
    if not isinstance(metadata, dict) or (missing := [k for k in needed if k not in metadata]):
        what = all_of(missing) if isinstance(metadata, dict) else "JSON object"
        raise DatasetError(f"{file} has no {what}: it is damaged or incomplete")
    return metadata


def environment_of(name: str) -> dict[str, Any]:
    """Return the keys env and env_kwargs of a data set; {}: unknown.

    Raises:
        DatasetError: there is no such data set, or it is damaged.
    """
    data = find_dataset(name)[0]
    spec_json = read_metadata(data).get("env_spec")
    try:
        spec = {} if spec_json is None else json.loads(spec_json)
        env, kwargs = spec.get("id", ""), spec.get("kwargs") or {}
    except (TypeError, ValueError, AttributeError) as error:
        raise DatasetError(f"{data / METADATA} is damaged: env_spec: {error}") from error
    if not isinstance(env, str) or not isinstance(kwargs, dict):
        raise DatasetError(f"{data / METADATA} is damaged: env_spec: id is text, and kwargs a map")
    return {"env": env, "env_kwargs": kwargs} if env else {}


def partial_of(name: str) -> str:
    """Return the pattern of directories of incomplete data sets."""
    return f".{name}.partial-*"


def _unfinished(directory: Path, name: str) -> str:
    """Describe incomplete data sets in a directory, or ""."""
    found = sorted(each.name for each in directory.glob(partial_of(name)))
    if not found:
        return ""
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f". {directory / found[0]}{others} cannot be read: it is being written, or its "
        "process was killed before the end"
    )


def _places_in(directory: Path) -> list[Path]:
    """Return the directories that may be data sets, or []."""
    for place in (directory / DATA, directory):
        if (place / METADATA).is_file():
            return [place]
    return sorted(directory.glob(f"{PARTS}/{DATA}"))


def _nearest_path(wrong: Path) -> str | None:
    """Return the path of the data set that was probably meant.

    Assumes that its last name is wrong, or the name before it.
    """
    for count in range(1, 1 + min(2, len(wrong.parts))):
        above = wrong.parents[count - 1]
        directory = above.expanduser()
        if directory.is_dir():
            found = islice(directory.glob("/".join("*" * count)), _MOST_LOOKED_AT)
            known = [each.relative_to(directory).as_posix() for each in found if _is_one(each)]
            near = closest("/".join(wrong.parts[-count:]), known)
            return near and str(above / near)
    return None


def _is_one(directory: Path) -> bool:
    """Return whether a directory has a readable data set."""
    try:
        return not directory.name.startswith(".") and bool(_places_in(directory))
    except OSError:  # not readable
        return False


def _minari_directory() -> Path:
    """Return Minari's directory of data sets on this host."""
    given = os.environ.get("MINARI_DATASETS_PATH")
    return Path(given) if given else Path.home() / ".minari" / "datasets"


def _names_in(directory: Path) -> Iterator[str]:
    for found in directory.glob(f"**/{DATA}/{METADATA}"):
        yield found.parent.parent.relative_to(directory).as_posix()
