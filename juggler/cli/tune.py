"""`juggler tune`: measures this machine, and says which sizes suit it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from juggler.cli.arguments import keys_given, parse_first, parse_rest, report_errors
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.given_config import load_given

_LEAST_SECONDS = 1.0


@dataclass(kw_only=True)
class Arguments:
    """Measure a configuration's own environment, module and algorithm on this machine for about a
    minute, and say which numbers of EnvRunners and environments, and which fragments, suit it."""

    config: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CONFIG]")] = None
    """A configuration that ships with Juggler, or a .toml file. Options override its values."""

    write: str | None = None
    """Write the configuration with these sizes to this file, which `juggler train` takes."""

    seconds: float = 60.0
    """How long to measure, about."""

    run: RunConfig = field(default_factory=RunConfig)


def run(arguments: Sequence[str]) -> int:
    return report_errors("tune", lambda: _tune(arguments))


def _tune(arguments: Sequence[str]) -> int:
    from juggler.experiments.tuning.advice import advise, lines_of, write

    first, algorithm = parse_first(Arguments, arguments, "tune")
    base, in_file = load_given(first.config, algorithm)
    given = parse_rest(Arguments, arguments, "tune", Arguments(run=base))
    given.run.validate()
    if not given.seconds >= _LEAST_SECONDS:
        raise ConfigError(f"--seconds must be at least {_LEAST_SECONDS:g}, not {given.seconds}")
    to = None if given.write is None else Path(given.write)
    if to is not None:
        _must_be_writable(to)
    keys = in_file | keys_given(arguments)
    advice = advise(given.run, keys, given.seconds, _say)
    for line in lines_of(advice):
        print(line)
    if to is not None:
        write(advice, to)
        print(f"\njuggler train {to}")
    return 0


def _must_be_writable(path: Path) -> None:
    """
    Raises:
        ConfigError: no file can be made there.
    """
    if path.exists():
        raise ConfigError(f"--write {path}: it is there, and is not overwritten")
    if not path.parent.is_dir():
        raise ConfigError(f"--write {path}: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--write {path}: this user may not write in {path.parent}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
