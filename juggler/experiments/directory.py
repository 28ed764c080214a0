"""The directory of several runs, and the configuration that they share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.given_config import load_given
from juggler.driver.record.checkpoints import write_synced
from juggler.driver.record.directory_lock import lock
from juggler.driver.record.run_directory import RunDirectoryError, must_be_free
from juggler.runtime.importing import must_not_be_imported


def configured(
    config: str | Path | RunConfig | None, keys: Mapping[str, Any]
) -> tuple[RunConfig, RunConfig, frozenset[str]]:
    """What a script has given for its runs.

    Args:
        config: as in `juggler.train`.
        keys: of the configuration, which override it.

    Returns:
        The configuration without these keys, the complete one, and the keys that were given.

    Raises:
        ConfigError: a key or a value is wrong, or a class is given by itself.
    """
    for key in ("env", "module"):
        if callable(keys.get(key)):
            raise ConfigError(
                f"{key}: each run is a process of its own, which has to import it: give its name, "
                f'such as "my_file:{getattr(keys[key], "__name__", "Mine")}"'
            )
    if isinstance(config, RunConfig):
        base, given = config, frozenset(config.flat())
    else:
        base, given = load_given(config, keys.get("algorithm"))
    return base, RunConfig.from_flat({**base.flat(), **keys}), given | keys.keys()


def must_not_record(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: the runs would record what they sample, all of them in the same place.
    """
    if config.env_runner.record:
        raise ConfigError(
            f"record = {config.env_runner.record!r}: several runs would record into the same "
            "directory: leave it out here, and record a run by itself, with juggler train"
        )


def make_directory(
    path: Path | None, kind: str, env: str, file: str, content: bytes, going_on: str
) -> Path:
    """Make a directory, with a file that says what its runs are.

    Args:
        path: where nothing is yet; None: a new directory under runs/.
        kind: "sweep" or "seeds", with which the name of a new one begins.
        env: of the runs.
        file: the name of the file.
        content: of the file.
        going_on: the command that goes on with such a directory.

    Raises:
        RunDirectoryError: something is there, or it cannot be made.
    """
    must_not_be_imported()
    name = re.sub(r"[^\w.-]+", "-", env.rpartition(":")[2])
    path = path or Path("runs") / f"{kind}-{name}-{datetime.now():%Y%m%d-%H%M%S}"
    must_be_free(path, going_on=going_on)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_synced(path / file, content)
    except OSError as error:
        raise RunDirectoryError(f"cannot make the directory {path}: {error}") from error
    return path


@contextmanager
def held(path: Path, file: str) -> Iterator[None]:
    """Keep other processes out of the directory meanwhile.

    Raises:
        RunDirectoryError: another process has it, or it is not one that `make_directory` has made.
    """
    must_not_be_imported()
    if not (path / file).is_file():
        raise RunDirectoryError(f"{path} has no {file}: give the directory that was made for this")
    with (path / file).open("rb") as locked:
        if not lock(locked):
            raise RunDirectoryError(
                f"another process is at work in {path}; stop it before you go on there"
            )
        yield
