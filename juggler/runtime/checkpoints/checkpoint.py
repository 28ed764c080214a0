"""Checkpoints: atomic snapshots of a run, and handling of damaged ones.

A checkpoint is a directory, named after its update, with two files:

- `state.safetensors`: every array of the tree, named by its path from the root, joined with "/";
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
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from juggler.runtime.plain_files import read_json, read_plain
from juggler.runtime.wire.trees import Tree, leaves, unflatten

#: The keys from the root of a tree down to an array or an empty branch.
Keys: TypeAlias = tuple[str, ...]

#: Data types by their names in safetensors, which has more that are not used here.
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "I8": np.dtype(np.int8),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def encode_tree(tree: Tree) -> tuple[bytes, list[Keys]]:
    """Encode a tree's arrays as a file; also return empty branches.

    Raises:
        ValueError: a value cannot be stored in a file; names it.
    """
    arrays: dict[str, NDArray[Any]] = {}
    empty: list[Keys] = []
    for keys, array in leaves(tree):
        name = "/".join(keys)
        if any("/" in key for key in keys) or name == "__metadata__":
            raise ValueError(f"{keys} is no name for an array")
        if array is None:
            empty.append(keys)
            continue
        little = array.dtype.newbyteorder("<")
        if little not in _DTYPES.values():
            raise ValueError(f"{name} has dtype {array.dtype}, which a checkpoint cannot hold")
        # safetensors reads the memory as it is, and ignores the strides.
        arrays[name] = np.asarray(array, dtype=little, order="C")
    return safetensors.numpy.save(arrays), empty


def decode_tree(content: bytes, empty: Iterable[Keys]) -> Tree:
    """Decode the tree that `encode_tree` wrote, with writable arrays.

    Raises:
        ValueError: the content is not from `encode_tree`, or the empty branches belong to another
            tree.
    """
    try:
        # safetensors.numpy.load has no bfloat16, so the arrays are made here.
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        arrays = [
            (
                tuple(name.split("/")),
                np.ndarray(entry["shape"], _DTYPES[entry["dtype"]], buffer=entry["data"]),
            )
            for name, entry in sorted(entries, key=lambda entry: entry[0])
        ]
    except KeyError as error:
        raise ValueError(f"dtype {error} is unknown") from error
    except (safetensors.SafetensorError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return unflatten(arrays, empty)


FORMAT: Final = 2  # format 1, of runs with one module, can also be read
STATE_FILE: Final = "state.safetensors"
METADATA_FILE: Final = "checkpoint.json"
_MOST_METADATA: Final = 1 << 26  # maximum bytes of checkpoint.json
DIRECTORY: Final = "checkpoints"  # within a run directory
#: Further directories with one checkpoint each: a candidate to confirm, the checkpoint of an
#: evaluation, and the best checkpoint.
CANDIDATE: Final = "candidate"
EVALUATED: Final = "evaluated"
BEST: Final = "best"
CONNECTORS: Final = "connectors"  # the branch of a tree with the EnvRunners' connectors
#: The branch of a tree, and of a learner's state, with the state of learner pipelines by module id.
PIPELINES: Final = "learner_pipelines"

#: The branch of a learner's state with the steps that it keeps.
REPLAY: Final = "replay"
#: Branches of a learner's state with the states of cores around the algorithm's, by module id.
RND: Final = "rnd"
IMITATION: Final = "imitation"

_CONFIG: Final = "config.toml"  # of a run directory, as below
_SUMMARY: Final = "summary.json"

OLD_MODULE: Final = "default"  # module id of a checkpoint without module ids
#: Fields per module in newer checkpoints.
_BY_MODULE: Final = {"counters", "spaces"}
_NAME = re.compile(r"(\d{9,})(\.replaced)?")

#: Keys of earlier versions, without which a checkpoint's run continues: their old default, and a
#: remedy.
RETIRED_KEYS: Final[Mapping[str, tuple[Any, str]]] = {
    "autoreset": (
        "auto",
        "remove it: an environment resets in the step that ends its episode, and a vector of your "
        "own resets as its metadata says",
    ),
    "max_learners": (64, "remove it: up to 64 learners take part at once"),
    "max_times_sampled": (0, "remove it: a kept step leaves when newer ones need its room"),
    "record_gb": (None, "remove it: a run records all episodes, and stop_steps limits them"),
    "replay_remover": ("fifo", "remove it: the oldest kept steps leave for new ones"),
    "replay_selector": (
        "random",
        "remove it: kept steps are drawn uniformly or by priority_exponent; to learn from "
        "each step once, in order, take impala or ppo",
    ),
    "requests_per_runner": (2, "remove it: two requests are in flight at each EnvRunner"),
    "trace": ("", "remove it: runs write no traces, and callbacks can follow a run's updates"),
    "updates_in_flight": (2, "remove it: two updates are in flight at a learner"),
}
#: The fields of checkpoint.json that a `Checkpoint` has, and their types.
FIELDS = {"version": list, "modules": dict, "counters": dict, "config": dict, "spaces": dict}


class CheckpointError(Exception):
    """A checkpoint cannot be written, or is not valid."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Everything that a run needs to continue.

    All dicts except `tree` are plain JSON (infinities and NaN allowed); tuples come back as lists.
    """

    version: tuple[int, int]  # (generation, update) of the run, which orders its checkpoints
    tree: dict[str, Tree]  # the learners' states by module id; pipelines and connectors
    # By module id: the "version" of its weights, its learner's "extra", its "counters" in the
    # driver's books, and the "spaces" of its agents. Older checkpoints do not have the last two. A
    # module that was added during the run also has "settings_of", the module whose settings it
    # uses.
    modules: dict[str, Any]
    counters: dict[str, Any]  # the driver's counters, summed over all modules
    config: dict[str, Any]  # flat
    spaces: dict[str, Any]  # with one module: the spaces of its agents
    path: Path | None = None  # its directory
    problems: tuple[str, ...] = ()  # of newer checkpoints that were skipped

    def release_arrays(self) -> None:
        """Free the arrays, for all holders of the checkpoint."""
        self.tree.clear()

    @property
    def module_ids(self) -> tuple[str, ...]:
        """Ids of the modules in the checkpoint."""
        return tuple(self.modules) or (OLD_MODULE,)

    def module_id(self, wanted: str | None = None) -> str:
        """Return a module id of the checkpoint; without `wanted`, the only one.

        Raises:
            CheckpointError: no such module, or several and `wanted` is None.
        """
        where, known = self.path or Path("in memory"), ", ".join(map(repr, self.module_ids))
        if wanted is None and len(self.module_ids) > 1:
            raise CheckpointError(where, f"there are several modules: name one of {known}")
        if wanted is not None and wanted not in self.module_ids:
            raise CheckpointError(where, f"there is no module {wanted!r}, but there are {known}")
        return self.module_ids[0] if wanted is None else wanted

    def version_of(self, module_id: str) -> tuple[int, int]:
        """Return the (generation, update) of a module's weights."""
        generation, update = self.modules.get(module_id, {}).get("version", self.version)
        return generation, update

    def counters_of(self, module_id: str) -> dict[str, Any]:
        """Return the books of a module."""
        counters: dict[str, Any] = self.modules.get(module_id, {}).get("counters", self.counters)
        return counters

    def spaces_of(self, module_id: str) -> dict[str, Any]:
        """Return the spaces of a module's agents: "observation" and "action"."""
        spaces: dict[str, Any] = self.modules.get(module_id, {}).get("spaces", self.spaces)
        return spaces

    def learned_of(self, module_id: str) -> Any:
        """Return the state of a module's connectors, as a tree; {}: none."""
        learned = self.tree.get(CONNECTORS, {})
        if self.module_ids != (OLD_MODULE,) and isinstance(learned, Mapping):
            return learned.get(module_id, {})
        return learned

    def config_of(self, module_id: str) -> dict[str, Any]:
        """Return the configuration with a module's table merged in.

        Enough for acting; if a module has its own algorithm, `RunConfig.of` knows its keys.
        """
        tables = self.config.get("modules", {})
        return {**self.config, **tables.get(self.settings_of(module_id), {})}

    def settings_of(self, module_id: str) -> str:
        """Return the module whose settings this one uses, mostly itself."""
        return str(self.modules.get(module_id, {}).get("settings_of", module_id))


def read(path: str | Path) -> Checkpoint:
    """Read and verify the checkpoint at `path`.

    Args:
        path: a checkpoint; or a `checkpoints` directory or a run directory, whose newest good
            checkpoint is read. Its `problems` describe damage of newer ones.

    Raises:
        ValueError: `path` is not a path.
        CheckpointError: it is missing or damaged; the message has details.
    """
    if not isinstance(path, str | Path):
        raise ValueError(
            f"the checkpoint is {path!r}: give the path of a checkpoint or of a run. A result's "
            "`checkpoint` is None if the run has written none, and its `best` if it had no "
            "evaluation (evaluation_seconds)"
        )
    path = Path(path)
    try:
        if not path.exists():
            why = ": the run has had no evaluation; set evaluation_seconds"
            why = why if path.name == BEST and (path.parent / DIRECTORY).is_dir() else ""
            raise CheckpointError(path, f"there is no such file or directory{why}")
        if not path.is_dir():
            raise CheckpointError(path, "is a file; give the directory of the checkpoint or run")
        # A run directory may itself be named like a checkpoint.
        is_run = (path / DIRECTORY).is_dir()
        if not is_run and (_NAME.fullmatch(path.name) or (path / METADATA_FILE).exists()):
            return _read_one(path)
        directory = path / DIRECTORY if is_run else path
        if not newest_first(directory):
            raise CheckpointError(path, f"holds no checkpoint{_why_none(path)}")
        checkpoint, problems = newest_good(directory)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    return replace(checkpoint, problems=tuple(problems))


def read_or_warn(path: str | Path) -> Checkpoint:
    """Call `read`, with a warning for each newer, damaged checkpoint.

    Raises:
        ValueError: as for `read`.
        CheckpointError: as for `read`.
    """
    found = read(path)
    for problem in found.problems:
        warnings.warn(f"skipped, and used an earlier checkpoint: {problem}", stacklevel=3)
    return found


def newest_good(directory: Path) -> tuple[Checkpoint, list[str]]:
    """Read the newest complete checkpoint of a `checkpoints` directory.

    Returns:
        The checkpoint, and the problem of each skipped one.

    Raises:
        CheckpointError: no checkpoint is good; the message lists them.
    """
    problems: list[str] = []
    try:
        for path in newest_first(directory):
            try:
                return _read_one(path), problems
            except CheckpointError as error:
                problems.append(str(error))
    except OSError as error:
        raise CheckpointError(directory, f"cannot be read: {error}") from error
    if not problems:
        raise CheckpointError(
            directory,
            "holds no checkpoint; give a checkpoint, or the directory of a run that has made one",
        )
    # There is no other checkpoint, so all problems are listed.
    found = "".join(f"\n  {problem}" for problem in problems)
    raise CheckpointError(directory, f"none of the checkpoints here is good:{found}")


def _why_none(path: Path) -> str:
    """Describe why a directory has no checkpoint."""
    runs = [each.parent for each in sorted(path.glob(f"*/{DIRECTORY}"))]
    if runs := [each for each in runs if (each / _CONFIG).is_file()]:
        return f": it holds several runs: name one, such as {runs[0]}"
    if not (path / _CONFIG).is_file():
        return "; give a checkpoint, or the directory of a run that has made one"
    # The summary of an ended run has the reason.
    try:
        end = read_json(path / _SUMMARY)
        how = end.get("failure") or f"it ended by {end['reason_for_stop']}"
        if end.get("env_steps_trained"):
            return f" any more, or could not write any: {how}"
    except (OSError, ValueError, LookupError, AttributeError):
        return (
            ": its run was killed before its first one, or has made none yet. The first comes "
            "after checkpoint_seconds, or after checkpoint_updates with synchronous = true"
        )
    return f": its run ended before its first update, so it has learned nothing: {how}"


def digest(metadata: dict[str, Any]) -> str:
    """Return the digest of the other content of checkpoint.json."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def _read_one(path: Path) -> Checkpoint:
    """Read and verify one checkpoint."""
    metadata = read_metadata(path)
    try:
        fields = {name: metadata[name] for name in FIELDS}
        expected = metadata["files"][STATE_FILE]
        empty = [tuple(map(str, keys)) for keys in metadata["empty_branches"]]
        sound = all(isinstance(fields[name], kind) for name, kind in FIELDS.items())
        sound = sound and all(map(_is_module, fields["modules"].values()))
        # The size first: a truncated file is not called corrupt.
        state = _read_file(path, STATE_FILE, expected["size"])
        if hashlib.sha256(state).hexdigest() != expected["sha256"]:
            raise CheckpointError(path, f"{STATE_FILE} is corrupt: its SHA-256 differs")
        tree = decode_tree(state, empty)
    # A damaged file, and not a mistake in here.
    except (KeyError, TypeError) as error:
        raise CheckpointError(path, f"{METADATA_FILE} has missing fields: {error}") from error
    except ValueError as error:
        raise CheckpointError(path, f"{STATE_FILE} is corrupt: {error}") from error
    except MemoryError as error:
        size = (path / STATE_FILE).stat().st_size
        raise CheckpointError(
            path, f"{STATE_FILE} has {size} bytes, and this host has not enough free memory for it"
        ) from error
    if not (sound and _is_version(fields["version"]) and isinstance(tree, dict)):
        raise CheckpointError(path, f"{METADATA_FILE} has fields of wrong types")
    fields["version"] = tuple(fields["version"])
    return Checkpoint(**fields, tree=tree, path=path)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read and verify checkpoint.json.

    Raises:
        CheckpointError: it is damaged or missing.
    """
    content = _read_file(path, METADATA_FILE)
    try:
        metadata = json.loads(content)
        if not isinstance(metadata, dict) or "format" not in metadata:
            raise CheckpointError(path, f"{METADATA_FILE} is not the file of a checkpoint")
        if metadata["format"] not in (1, FORMAT):
            raise CheckpointError(
                path,
                f"has format {metadata['format']}, written by Juggler "
                f"{metadata.get('juggler_version')}; this Juggler reads formats 1 and {FORMAT}",
            )
        # The digest is of everything but itself.
        if metadata.pop("sha256", None) != digest(metadata):
            raise CheckpointError(path, f"{METADATA_FILE} is corrupt: its SHA-256 differs")
        if metadata["format"] == 1:
            of_module = {key: metadata[key] for key in ("version", "extra") if key in metadata}
            metadata["modules"] = {OLD_MODULE: of_module}
        if isinstance(config := metadata.get("config"), dict):
            metadata["config"] = without_retired(config, _lost)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"{METADATA_FILE} is truncated or corrupt: {error}") from error
    return metadata


def had_no_effect(key: str, value: Any) -> bool:
    """Return whether a retired key has its old default."""
    return value in (RETIRED_KEYS[key][0], "none")


def without_retired(
    config: Mapping[str, Any], leave_out: Callable[[str, Any], bool] = had_no_effect
) -> dict[str, Any]:
    """Copy a configuration without retired keys, in all tables.

    Args:
        config: flat.
        leave_out: returns whether a retired key with this value is left out.
    """
    kept = {
        key: value
        for key, value in config.items()
        if key not in RETIRED_KEYS or not leave_out(key, value)
    }
    if isinstance(tables := kept.get("modules"), Mapping):
        kept["modules"] = {
            name: without_retired(table, leave_out) if isinstance(table, Mapping) else table
            for name, table in tables.items()
        }
    return kept


def _lost(key: str, value: Any) -> bool:
    """Drop a retired key, with a warning if its value mattered."""
    if value is not None and not had_no_effect(key, value):
        what = f"{key} = {value!r} of a checkpoint no longer has an effect"
        warnings.warn(f"{what}: {RETIRED_KEYS[key][1]}", stacklevel=2)
    return True


def _read_file(path: Path, name: str, size: int | None = None) -> bytes:
    file = path / name
    try:
        if not file.exists():
            raise CheckpointError(path, f"{name} is missing")
        if not file.is_file():  # reading a pipe would block
            raise CheckpointError(path, f"{name} is not a file")
        found = file.stat().st_size
        if size is not None and found != size:
            how = "truncated" if found < size else "corrupt"
            raise CheckpointError(path, f"{name} is {how}: it has {found} bytes, not {size}")
        return read_plain(file.resolve(), _MOST_METADATA if size is None else size)
    except OSError as error:
        raise CheckpointError(path, f"{name} cannot be read: {error}") from error


def _is_module(value: object) -> bool:
    return (
        isinstance(value, dict)
        and _is_version(value.get("version"))
        and all(isinstance(value.get(key), dict) for key in ("extra", *value.keys() & _BY_MODULE))
    )


def _is_version(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(number) is int and number >= 0 for number in value)
    )


def newest_first(directory: Path) -> list[Path]:
    """List the checkpoints in a directory, unreadable ones first.

    They are ordered by version, not by update: a run restored from an older checkpoint repeats
    update numbers, in a higher generation.
    """
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (version_of(path), path.suffix == ""), reverse=True)


def version_of(path: Path) -> tuple[float, float]:
    """Return the version of a checkpoint's weights; infinite if unreadable."""
    try:
        version = read_metadata(path)["version"]
        return (version[0], version[1]) if _is_version(version) else (math.inf, math.inf)
    except (CheckpointError, KeyError):
        return (math.inf, math.inf)


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
        CheckpointError: writing fails, or a value cannot be stored in a checkpoint.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    target = directory / f"{checkpoint.version[1]:09d}"
    temporary = directory / f".{target.name}.tmp"
    try:
        state, empty = encode_tree(checkpoint.tree)
        metadata = _encode_metadata(checkpoint, state, empty)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(target, f"cannot be written: {error}") from error
    try:
        # Everything is encoded: only the disk can still fail.
        if not directory.is_dir():
            directory.mkdir(parents=True)
            _sync_directory(directory.parent)
        _delete_half_done(directory)
        try:
            temporary.mkdir()
            write_synced(temporary / STATE_FILE, state)
            write_synced(temporary / METADATA_FILE, metadata)
            _sync_directory(temporary)
            # Both files are on the disk before the directory gets its name.
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
    """Move a checkpoint into a directory as its newest.

    Newer and outdated checkpoints are deleted. The directory always has a good checkpoint.

    Args:
        candidate: a checkpoint on the same disk.
        directory: the `checkpoints` directory of a run.
        keep: as in `write`.

    Raises:
        CheckpointError: moving it fails.
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


def _encode_metadata(checkpoint: Checkpoint, state: bytes, empty: list[tuple[str, ...]]) -> bytes:
    metadata = {
        "format": FORMAT,
        "juggler_version": _VERSION,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: getattr(checkpoint, name) for name in FIELDS},
        "empty_branches": empty,
        "files": {STATE_FILE: {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}},
    }
    # As it will be read: string keys, and lists for tuples.
    metadata = json.loads(json.dumps(metadata))
    return json.dumps({**metadata, "sha256": digest(metadata)}, indent=2).encode()


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
    """Delete files that a killed process was writing or deleting."""
    for stale in [path for path in directory.iterdir() if _TEMPORARY.fullmatch(path.name)]:
        shutil.rmtree(stale)


def _delete_outdated(directory: Path, newest: Path, keep: int) -> None:
    others = [path for path in newest_first(directory) if path != newest]
    kept = [p for p in others if p.suffix != ".replaced" and math.isfinite(version_of(p)[1])]
    for path in others:
        if path not in kept[: keep - 1]:
            _delete(path)


def _delete(path: Path) -> None:
    # Renamed first, so that a half-deleted checkpoint does not look damaged.
    path.rename(temporary := path.with_name(f".{path.name}.tmp"))
    shutil.rmtree(temporary)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
