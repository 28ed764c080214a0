"""Checkpoints: an atomic cut of a run, and how to handle a damaged one.

A checkpoint is a directory, named after its update, with two files:

- `state.safetensors`: every array of the tree, named by its path from the root, joined with "/";
- `checkpoint.json`: everything else, with the size and SHA-256 of the other file and a SHA-256 of
  its own content, so that a flipped bit in either is found.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from juggler.runtime.checkpoints import tensor_file
from juggler.runtime.plain_files import read_json, read_plain
from juggler.runtime.wire.trees import Tree

FORMAT: Final = 2  # format 1, of runs of one module, is read too
STATE_FILE: Final = "state.safetensors"
RECORD_FILE: Final = "checkpoint.json"
_MOST_RECORD: Final = 1 << 26  # bytes of it
DIRECTORY: Final = "checkpoints"  # within a run directory
#: Beside it, directories of one checkpoint each: that which is to be confirmed, that which an
#: evaluation plays, and that of the best evaluation.
CANDIDATE: Final = "candidate"
EVALUATED: Final = "evaluated"
BEST: Final = "best"
CONNECTORS: Final = "connectors"  # the branch of a tree that is not a learner's
#: The branch of a tree, and of a learner's state, with what learner pipelines hold by module id.
PIPELINES: Final = "learner_pipelines"

#: The branch of a learner's state with the steps that it keeps.
REPLAY: Final = "replay"
#: Its branches with what cores around the algorithm's keep, by module id.
RND: Final = "rnd"
IMITATION: Final = "imitation"

_CONFIG: Final = "config.toml"  # of a run directory, as below
_SUMMARY: Final = "summary.json"

OLD_MODULE: Final = "default"  # which a checkpoint without modules by id is of
#: What newer checkpoints have by module.
_BY_MODULE: Final = {"counters", "spaces"}
_NAME = re.compile(r"(\d{9,})(\.replaced)?")

#: Keys of earlier versions, which a checkpoint's run continues without: their old default, and
#: what to do instead.
RETIRED_KEYS: Final[Mapping[str, tuple[Any, str]]] = {
    "trace": ("", "remove it: runs write no traces, and callbacks can follow a run's updates"),
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
    # driver's books, and the "spaces" of its agents. Older checkpoints lack the last two. One that
    # came while the run went on also has, as "settings_of", the module whose settings it has.
    modules: dict[str, Any]
    counters: dict[str, Any]  # the driver's, with the sums over all modules
    config: dict[str, Any]  # flat
    spaces: dict[str, Any]  # where there is one module, those of its agents
    path: Path | None = None  # where it was read from
    problems: tuple[str, ...] = ()  # of newer checkpoints that were skipped

    def let_go_of_arrays(self) -> None:
        """Give their memory back, whoever still holds the checkpoint: a replay among them may be
        large."""
        self.tree.clear()

    @property
    def module_ids(self) -> tuple[str, ...]:
        """The modules that it has the states of."""
        return tuple(self.modules) or (OLD_MODULE,)

    def module_id(self, wanted: str | None = None) -> str:
        """A module that it has; without `wanted` the only one.

        Raises:
            CheckpointError: there is none of this id, or there are several to choose from.
        """
        where, known = self.path or Path("in memory"), ", ".join(map(repr, self.module_ids))
        if wanted is None and len(self.module_ids) > 1:
            raise CheckpointError(where, f"has several modules, of which to name one: {known}")
        if wanted is not None and wanted not in self.module_ids:
            raise CheckpointError(where, f"has no module {wanted!r}: there are {known}")
        return self.module_ids[0] if wanted is None else wanted

    def version_of(self, module_id: str) -> tuple[int, int]:
        """The (generation, update) of a module's weights."""
        generation, update = self.modules.get(module_id, {}).get("version", self.version)
        return generation, update

    def counters_of(self, module_id: str) -> dict[str, Any]:
        """The books of a module."""
        counters: dict[str, Any] = self.modules.get(module_id, {}).get("counters", self.counters)
        return counters

    def spaces_of(self, module_id: str) -> dict[str, Any]:
        """The spaces of the agents that a module plays: "observation" and "action"."""
        spaces: dict[str, Any] = self.modules.get(module_id, {}).get("spaces", self.spaces)
        return spaces

    def learned_of(self, module_id: str) -> Any:
        """The branch of the tree with what a module's connectors had learned; {}: nothing."""
        learned = self.tree.get(CONNECTORS, {})
        if self.module_ids != (OLD_MODULE,) and isinstance(learned, Mapping):
            return learned.get(module_id, {})
        return learned

    def config_of(self, module_id: str) -> dict[str, Any]:
        """The configuration, with what its table `modules` says of this one in place of the rest.
        This is all that acting needs; where a module has an algorithm of its own, `RunConfig.of`
        knows what that one learns with."""
        tables = self.config.get("modules", {})
        return {**self.config, **tables.get(self.settings_of(module_id), {})}

    def settings_of(self, module_id: str) -> str:
        """The module of the configuration whose settings this one has; most have their own."""
        return str(self.modules.get(module_id, {}).get("settings_of", module_id))


def read(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, verified.

    Args:
        path: a checkpoint; or a `checkpoints` directory or a run directory, whose newest good
            checkpoint is read. Its `problems` say what is wrong with newer ones.

    Raises:
        ValueError: this is no path.
        CheckpointError: there is none, or it is damaged; the message says how.
    """
    if not isinstance(path, str | Path):
        raise ValueError(
            f"the checkpoint is {path!r}: give the path of a checkpoint or of a run. A result's "
            "`checkpoint` is None where the run has written none, and its `best` where it had no "
            "evaluation, as evaluation_seconds asks for"
        )
    path = Path(path)
    try:
        if not path.exists():
            why = ": the run has had no evaluation, as evaluation_seconds asks for"
            why = why if path.name == BEST and (path.parent / DIRECTORY).is_dir() else ""
            raise CheckpointError(path, f"there is no such file or directory{why}")
        if not path.is_dir():
            raise CheckpointError(path, "is a file; give the directory of the checkpoint or run")
        is_run = (path / DIRECTORY).is_dir()
        if not is_run and (_NAME.fullmatch(path.name) or (path / RECORD_FILE).exists()):
            return _read_one(path)
        directory = path / DIRECTORY if is_run else path
        if not newest_first(directory):
            raise CheckpointError(path, f"holds no checkpoint{_why_none(path)}")
        checkpoint, problems = newest_good(directory)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    return replace(checkpoint, problems=tuple(problems))


def read_or_warn(path: str | Path) -> Checkpoint:
    """As `read`, with a warning for each newer checkpoint that is damaged, at the caller's caller.

    Raises:
        ValueError: as `read`.
        CheckpointError: likewise.
    """
    found = read(path)
    for problem in found.problems:
        warnings.warn(f"passed over, for the one before: {problem}", stacklevel=3)
    return found


def newest_good(directory: Path) -> tuple[Checkpoint, list[str]]:
    """The newest complete checkpoint of a `checkpoints` directory.

    Returns:
        The checkpoint, and what is wrong with each one that was skipped.

    Raises:
        CheckpointError: there is no good one; the message lists what was found.
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
    found = "".join(f"\n  {problem}" for problem in problems)
    raise CheckpointError(directory, f"none of the checkpoints here is good:{found}")


def _why_none(path: Path) -> str:
    """Why a directory has no checkpoint, for people."""
    if runs := sorted(path.glob(f"*/{DIRECTORY}")):
        return f": it holds several runs, of which to name one, such as {runs[0].parent}"
    if not (path / _CONFIG).is_file():
        return "; give a checkpoint, or the directory of a run that has made one"
    try:
        end = read_json(path / _SUMMARY)
        how = end.get("failure") or f"it ended by {end['reason_for_stop']}"
        if end.get("env_steps_trained"):
            return f" any more, or could not write any: {how}"
    except (OSError, ValueError, LookupError, AttributeError):
        return (
            ": its run was killed before its first one, or has made none yet. The first comes "
            "after checkpoint_seconds, or after checkpoint_updates where synchronous = true"
        )
    return f": its run ended before its first update, so it has learned nothing: {how}"


def digest(record: dict[str, Any]) -> str:
    """The digest of the other content of checkpoint.json."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_one(path: Path) -> Checkpoint:
    try:
        return _verified(path)
    except MemoryError as error:
        size = (path / STATE_FILE).stat().st_size
        raise CheckpointError(
            path, f"{STATE_FILE} has {size} bytes, and this host has not enough free memory for it"
        ) from error


def _verified(path: Path) -> Checkpoint:
    record = read_record(path)
    try:
        fields = {name: record[name] for name in FIELDS}
        expected = record["files"][STATE_FILE]
        empty = [tuple(map(str, keys)) for keys in record["empty_branches"]]
        sound = all(isinstance(fields[name], kind) for name, kind in FIELDS.items())
        sound = sound and all(map(_is_module, fields["modules"].values()))
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


def read_record(path: Path) -> dict[str, Any]:
    """The verified content of checkpoint.json.

    Raises:
        CheckpointError: it is damaged, or not there.
    """
    content = _read_file(path, RECORD_FILE)
    try:
        record = json.loads(content)
        if not isinstance(record, dict) or "format" not in record:
            raise CheckpointError(path, f"{RECORD_FILE} is not that of a checkpoint")
        if record["format"] not in (1, FORMAT):
            raise CheckpointError(
                path,
                f"has format {record['format']}, written by Juggler "
                f"{record.get('juggler_version')}; this Juggler reads formats 1 and {FORMAT}",
            )
        if record.pop("sha256", None) != digest(record):
            raise CheckpointError(path, f"{RECORD_FILE} is corrupt: its SHA-256 is another")
        if record["format"] == 1:
            of_module = {key: record[key] for key in ("version", "extra") if key in record}
            record["modules"] = {OLD_MODULE: of_module}
        if isinstance(config := record.get("config"), dict):
            record["config"] = {key: config[key] for key in config if key not in RETIRED_KEYS}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"{RECORD_FILE} is truncated or corrupt: {error}") from error
    return record


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
        return read_plain(file.resolve(), _MOST_RECORD if size is None else size)
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
    """The checkpoints in a directory, those without a readable version first.

    They are ordered by version and not by update: a run restored from an older checkpoint counts
    the same updates again, in a higher generation.
    """
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (version_of(path), path.suffix == ""), reverse=True)


def version_of(path: Path) -> tuple[float, float]:
    """The version of the weights in a checkpoint; infinite if it cannot be read."""
    try:
        version = read_record(path)["version"]
        return (version[0], version[1]) if _is_version(version) else (math.inf, math.inf)
    except (CheckpointError, KeyError):
        return (math.inf, math.inf)
