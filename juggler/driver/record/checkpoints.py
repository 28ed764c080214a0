"""Writes checkpoints, each whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from pathlib import Path

from juggler.runtime.checkpoints import tensor_file
from juggler.runtime.checkpoints.checkpoint import (
    FIELDS,
    FORMAT,
    RECORD_FILE,
    STATE_FILE,
    Checkpoint,
    CheckpointError,
    digest,
    newest_first,
    version_of,
)

_VERSION = distribution_version("juggler")
_TEMPORARY = re.compile(r"\.\d{9,}(\.replaced)?\.tmp")


def write(directory: Path, checkpoint: Checkpoint, keep: int = 3) -> Path:
    """Write a checkpoint, whole or not at all, and delete outdated ones.

    A power failure at any moment leaves a good checkpoint, because files are complete and on the
    disk before they get their name. A checkpoint of the same update is replaced.

    Args:
        directory: the `checkpoints` directory of a run; created if it is missing.
        checkpoint: the state to write.
        keep: number of checkpoints to keep, with the new one. Damaged ones are deleted and do not
            count.

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: the disk refuses, or a value cannot be stored in a checkpoint.
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
        _delete_half_done(directory)
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


def adopt(candidate: Path, directory: Path, keep: int = 3) -> Path:
    """Move a checkpoint into a directory as its newest, and delete newer and outdated ones.

    At every moment, the directory has a good checkpoint.

    Args:
        candidate: a checkpoint on the same disk.
        directory: the `checkpoints` directory of a run.
        keep: as in `write`.

    Raises:
        CheckpointError: the disk refuses.
    """
    target = directory / candidate.name
    try:
        version = version_of(candidate)
        _delete_half_done(directory)
        newer = [path for path in newest_first(directory) if version_of(path) > version]
        _rename_over(candidate, target)
        _sync_directory(directory)
        for path in newer:
            _delete(path)
        _delete_outdated(directory, target, keep)
    except OSError as error:
        raise CheckpointError(target, f"cannot be written: {error}") from error
    return target


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _encode_record(checkpoint: Checkpoint, state: bytes, empty: list[tuple[str, ...]]) -> bytes:
    record = {
        "format": FORMAT,
        "juggler_version": _VERSION,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: getattr(checkpoint, name) for name in FIELDS},
        "empty_branches": empty,
        "files": {STATE_FILE: {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}},
    }
    record = json.loads(json.dumps(record))  # as it will be read: string keys, and lists for tuples
    return json.dumps({**record, "sha256": digest(record)}, indent=2).encode()


def _rename_over(temporary: Path, target: Path) -> None:
    # A directory cannot be replaced in one step. Between the two renames, the old checkpoint has
    # another name, which readers know.
    if target.exists():
        replaced = target.with_name(target.name + ".replaced")
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    temporary.rename(target)


def _delete_half_done(directory: Path) -> None:
    """Delete what a process was writing or deleting when it was killed."""
    for stale in [path for path in directory.iterdir() if _TEMPORARY.fullmatch(path.name)]:
        shutil.rmtree(stale)


def _delete_outdated(directory: Path, newest: Path, keep: int) -> None:
    others = [path for path in newest_first(directory) if path != newest]
    kept = [p for p in others if p.suffix != ".replaced" and math.isfinite(version_of(p)[1])]
    for path in others:
        if path not in kept[: keep - 1]:
            _delete(path)


def _delete(path: Path) -> None:
    # Renamed first, so that a half-deleted checkpoint is not taken for a damaged one.
    path.rename(temporary := path.with_name(f".{path.name}.tmp"))
    shutil.rmtree(temporary)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
