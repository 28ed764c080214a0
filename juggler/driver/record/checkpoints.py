"""Writing checkpoints: whole or not at all, whatever happens meanwhile."""

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


def adopt(candidate: Path, directory: Path, keep: int = 3) -> Path:
    """Makes a checkpoint that was written elsewhere on the same disk the newest of a directory,
    without a moment in which there is none. Newer ones are deleted, and those that it outdates.

    Args:
        candidate: where it is; it is moved.
        directory: the `checkpoints` directory of a run.
        keep: as in `write`.

    Raises:
        CheckpointError: the disk refuses.
    """
    target = directory / candidate.name
    try:
        version = version_of(candidate)
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
        **{name: getattr(checkpoint, name) for name in FIELDS},
        "empty_branches": empty,
        "files": {STATE_FILE: {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}},
    }
    record = json.loads(json.dumps(record))  # as it will be read: keys strings, tuples lists
    return json.dumps({**record, "sha256": digest(record)}, indent=2).encode()


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
    others = [path for path in newest_first(directory) if path != newest]
    kept = [p for p in others if p.suffix != ".replaced" and math.isfinite(version_of(p)[1])]
    for path in others:
        if path not in kept[: keep - 1]:
            _delete(path)


def _delete(path: Path) -> None:
    # Under a temporary name first, so that a half-deleted one is not taken for damaged.
    path.rename(temporary := path.with_name(f".{path.name}.tmp"))
    shutil.rmtree(temporary)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
