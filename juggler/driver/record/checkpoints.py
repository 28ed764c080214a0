"""Checkpoints: one atomic cut of a run, and what to make of a damaged one.

A checkpoint is a directory, named after its update, of two files:

- `state.safetensors`: every array of the tree, its name the path from the root joined with "/";
- `checkpoint.json`: everything else, with the size and SHA-256 of the other file and a SHA-256 of
  its own content, so that a flipped bit in either is found.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

from juggler.driver.record import tensor_file
from juggler.runtime.wire.trees import Tree

FORMAT = 1
_VERSION = distribution_version("juggler")
STATE_FILE = "state.safetensors"
RECORD_FILE = "checkpoint.json"
DIRECTORY = "checkpoints"  # within a run directory

_NAME = re.compile(r"(\d{9,})(\.replaced)?")
_TEMPORARY = re.compile(r"\.\d{9,}(\.replaced)?\.tmp")

#: The fields of checkpoint.json that `Checkpoint` hands out, and their types.
_FIELDS = {"version": list, "extra": dict, "counters": dict, "config": dict, "spaces": dict}


class CheckpointError(Exception):
    """A checkpoint that cannot be written, or one that is not what it should be."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Everything that a run needs to go on where it was.

    The dicts but `tree` are plain JSON (infinities and NaN allowed); tuples come back as lists.
    """

    version: tuple[int, int]  # (generation, update) of the weights
    tree: Mapping[str, Tree]  # modules, optimizers, connectors, random states
    extra: dict[str, Any]  # what the learner keeps beside its arrays
    counters: dict[str, Any]  # the driver's
    config: dict[str, Any]  # flat
    spaces: dict[str, Any]
    path: Path | None = None  # where it was read from
    problems: tuple[str, ...] = ()  # of newer checkpoints that had to be passed over


def write(directory: Path, checkpoint: Checkpoint, keep: int = 3) -> Path:
    """Writes a checkpoint into `directory`, whole or not at all, and deletes those it outdates.

    A power failure at any moment leaves a good checkpoint: files are complete and on the disk
    before they get their name. A checkpoint of the same update is replaced.

    Args:
        directory: the `checkpoints` directory of a run; made where it is missing.
        checkpoint: what to write.
        keep: how many to keep, the new one included. Damaged ones are not counted, and deleted.

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: the disk refuses, or the checkpoint holds what has no place in one.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    target = directory / f"{checkpoint.version[1]:09d}"
    temporary = directory / f".{target.name}.tmp"
    try:
        state, empty = tensor_file.encode(checkpoint.tree)
        record = _encode_record(checkpoint, state, empty)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(target, f"cannot be written: {error}") from error
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True)
            _sync_directory(directory.parent)
        for stale in [path for path in directory.iterdir() if _TEMPORARY.fullmatch(path.name)]:
            shutil.rmtree(stale)
        try:
            temporary.mkdir()
            write_synced(temporary / STATE_FILE, state)
            write_synced(temporary / RECORD_FILE, record)
            _sync_directory(temporary)
            _rename_over(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_directory(directory)
        _delete_outdated(directory, target, keep)
    except OSError as error:
        raise CheckpointError(target, f"cannot be written: {error}") from error
    return target


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, verified.

    Args:
        path: a checkpoint, or a `checkpoints` directory or a run directory, of which the newest
            good checkpoint is read; its `problems` say what is wrong with newer ones.

    Raises:
        CheckpointError: there is none, or it is damaged; the message says how.
    """
    try:
        if not path.exists():
            raise CheckpointError(path, "there is no such file or directory")
        if not path.is_dir():
            raise CheckpointError(path, "is a file; give the directory of the checkpoint or run")
        is_run = (path / DIRECTORY).is_dir()
        if not is_run and (_NAME.fullmatch(path.name) or (path / RECORD_FILE).exists()):
            return _read_one(path)
        checkpoint, problems = newest_good(path / DIRECTORY if is_run else path)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    return replace(checkpoint, problems=tuple(problems))


def newest_good(directory: Path) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint of a `checkpoints` directory that is whole.

    Returns:
        The checkpoint, and what is wrong with each of those that were passed over.

    Raises:
        CheckpointError: there is no good one; the message lists what was found.
    """
    problems: list[str] = []
    try:
        for path in _newest_first(directory):
            try:
                return _read_one(path), problems
            except CheckpointError as error:
                problems.append(str(error))
    except OSError as error:
        raise CheckpointError(directory, f"cannot be read: {error}") from error
    if not problems:
        raise CheckpointError(
            directory, "holds no checkpoint; give a checkpoint or the directory of a run"
        )
    found = "".join(f"\n  {problem}" for problem in problems)
    raise CheckpointError(directory, f"none of the checkpoints here is good:{found}")


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _encode_record(checkpoint: Checkpoint, state: bytes, empty: list[tuple[str, ...]]) -> bytes:
    record = {
        "format": FORMAT,
        "juggler_version": _VERSION,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: getattr(checkpoint, name) for name in _FIELDS},
        "empty_branches": empty,
        "files": {STATE_FILE: {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}},
    }
    record = json.loads(json.dumps(record))  # as it will be read: keys strings, tuples lists
    return json.dumps({**record, "sha256": _digest(record)}, indent=2).encode()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_one(path: Path) -> Checkpoint:
    record = _read_record(path)
    try:
        fields = {name: record[name] for name in _FIELDS}
        expected = record["files"][STATE_FILE]
        empty = [tuple(map(str, keys)) for keys in record["empty_branches"]]
        sound = all(isinstance(fields[name], kind) for name, kind in _FIELDS.items())
        state = _read_file(path, STATE_FILE, expected["size"])
        if hashlib.sha256(state).hexdigest() != expected["sha256"]:
            raise CheckpointError(path, f"{STATE_FILE} is corrupt: its SHA-256 is another")
    except (KeyError, TypeError) as error:
        raise CheckpointError(path, f"{RECORD_FILE} lacks fields: {error}") from error
    try:
        tree = tensor_file.decode(state, empty)
    except ValueError as error:
        raise CheckpointError(path, f"{STATE_FILE} is corrupt: {error}") from error
    if not (sound and _is_version(fields["version"]) and isinstance(tree, dict)):
        raise CheckpointError(path, f"{RECORD_FILE} has fields of wrong types")
    fields["version"] = tuple(fields["version"])
    return Checkpoint(**fields, tree=tree, path=path)


def _read_record(path: Path) -> dict[str, Any]:
    """checkpoint.json, its own content verified."""
    content = _read_file(path, RECORD_FILE)
    try:
        record = json.loads(content)
        if not isinstance(record, dict) or "format" not in record:
            raise CheckpointError(path, f"{RECORD_FILE} is not that of a checkpoint")
        if record["format"] != FORMAT:
            raise CheckpointError(
                path,
                f"has format {record['format']}, written by Juggler "
                f"{record.get('juggler_version')}; this Juggler reads format {FORMAT} alone",
            )
        digest = record.pop("sha256", None)
        if digest != _digest(record):
            raise CheckpointError(path, f"{RECORD_FILE} is corrupt: its SHA-256 is another")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"{RECORD_FILE} is truncated or corrupt: {error}") from error
    return record


def _read_file(path: Path, name: str, size: int | None = None) -> bytes:
    file = path / name
    try:
        if not file.exists():
            raise CheckpointError(path, f"{name} is missing")
        if not file.is_file():  # a pipe would keep us waiting
            raise CheckpointError(path, f"{name} is not a file")
        found = file.stat().st_size
        if size is not None and found != size:
            how = "truncated" if found < size else "corrupt"
            raise CheckpointError(path, f"{name} is {how}: it has {found} bytes, not {size}")
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"{name} cannot be read: {error}") from error


def _is_version(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(number) is int and number >= 0 for number in value)
    )


def _newest_first(directory: Path) -> list[Path]:
    """The checkpoints in a directory, those that cannot say their version ahead of all.

    A version orders where an update cannot: a run restored from an older checkpoint counts the
    same updates again, in a higher generation.
    """
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_version(path), path.suffix == ""), reverse=True)


def _version(path: Path) -> tuple[float, float]:
    try:
        version = _read_record(path)["version"]
        return (version[0], version[1]) if _is_version(version) else (math.inf, math.inf)
    except (CheckpointError, KeyError):
        return (math.inf, math.inf)


def _rename_over(temporary: Path, target: Path) -> None:
    # A directory cannot be replaced in one step: until the second rename is done, what stood here
    # goes by another name that `newest_good` knows.
    if target.exists():
        replaced = target.with_name(target.name + ".replaced")
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    temporary.rename(target)


def _delete_outdated(directory: Path, newest: Path, keep: int) -> None:
    others = [path for path in _newest_first(directory) if path != newest]
    kept = [p for p in others if p.suffix != ".replaced" and math.isfinite(_version(p)[1])]
    for path in others:
        if path not in kept[: keep - 1]:
            # Under a temporary name first, so that a half-deleted one is not taken for damaged.
            path.rename(temporary := directory / f".{path.name}.tmp")
            shutil.rmtree(temporary)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
