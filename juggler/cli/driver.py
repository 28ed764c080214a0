"""`juggler driver`: a run whose workers dial in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from juggler.cli import STARTED
from juggler.cli.arguments import (
    AccessArguments,
    ConfigArguments,
    Flag,
    MonitoringArguments,
    keys_given,
    parse_first,
    parse_rest,
    report_errors,
)
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import load_config_and_keys
from juggler.driver.driver import Listen, StartSettings
from juggler.driver.reporting.run_directory import has_checkpoint
from juggler.driver.start_run import resume_run, start_run
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.checkpoints.checkpoint import Checkpoint, read


@dataclass(kw_only=True)
class RunArguments(ConfigArguments, MonitoringArguments):
    """A run that a command starts or resumes."""

    resume: str | None = None
    """Resume the run in this directory from its newest checkpoint, unless it has reached its
    goal."""

    insecure: Flag = False
    """Serve --metrics-bind beyond loopback without encryption: only on a network that you trust."""


R = TypeVar("R", bound=RunArguments)


@dataclass(kw_only=True)
class Arguments(RunArguments, AccessArguments):
    """Drive a run.

    Workers dial in with `juggler envrunner`, `juggler learner` and `juggler evaluator`, at any
    time.
    """

    bind: str = "127.0.0.1:5005"
    """Address to listen on, HOST:PORT."""

    insecure: Flag = False
    """Listen beyond loopback without TLS or without a token: only on a network that you trust."""

    go_on: Flag = False
    """Resume the run in --run-dir from its newest checkpoint if it has one, otherwise start it:
    for supervisors that restart a driver with the same command."""


def run(arguments: Sequence[str]) -> int:
    return report_errors("driver", lambda: _drive(arguments))


@dataclass(frozen=True, slots=True)
class CheckedArguments(Generic[R]):
    """The checked arguments of a command."""

    arguments: R
    keys: frozenset[str]  # given keys of the configuration
    checkpoint: Checkpoint | None  # to resume from; None: a new run

    def start(self, started: float, over: bool = False, listen: Listen | None = None) -> None:
        """Train to the end; see `start_run`."""
        given = self.arguments
        secrets = () if listen is None else (listen.token, listen.tls)
        monitoring = given.monitoring(given.insecure, *secrets)
        how = StartSettings(started, listen=listen, monitoring=monitoring)
        if self.checkpoint is None or given.resume is None:
            start_run(given.run, self.keys, how, over)
        else:
            resume_run(Path(given.resume), self.checkpoint, given.run, how)


def read_given(
    kind: type[R], arguments: Sequence[str], command: str, options: R, algorithm: str | None
) -> CheckedArguments[R]:
    """Parse and check the arguments that `parse_first` has partly read."""
    if options.resume is not None and options.config is not None:
        raise ConfigError("give a configuration or --resume, not both")
    checkpoint = None
    if options.resume is not None:
        checkpoint = read(Path(options.resume))
        base = RunConfig.from_flat(checkpoint.config, where=options.resume)
        keys = frozenset(checkpoint.config)
    else:
        base, keys = load_config_and_keys(options.config, algorithm)
    given = parse_rest(kind, arguments, command, base)
    given.resume = options.resume
    return CheckedArguments(given, keys | keys_given(arguments), checkpoint)


def read_arguments(arguments: Sequence[str]) -> CheckedArguments[Arguments]:
    """Parse and check the arguments of `juggler driver`."""
    first, algorithm = parse_first(Arguments, arguments, "driver")
    if first.go_on:
        if first.resume is not None or first.run.driver.run_dir is None:
            raise ConfigError("--go-on needs --run-dir, and cannot be used with --resume")
        if has_checkpoint(Path(first.run.driver.run_dir)):
            # The run resumes with its own configuration, and ignores the command's.
            first.resume, first.config = first.run.driver.run_dir, None
    given = read_given(Arguments, arguments, "driver", first, algorithm)
    for key, plain in (("num_evaluators", 1), ("evaluation_video", 0)):
        if (value := getattr(given.arguments.run.driver, key)) != plain:
            raise ConfigError(
                f"{key} = {value}: this is for evaluators on the driver's host, but here they "
                f"dial in; leave it at {plain}"
            )
    return given


def _drive(arguments: Sequence[str]) -> int:
    read_first = read_arguments(arguments)
    given = read_first.arguments
    tls = read_tls(given.tls)
    listen = Listen(given.bind, given.insecure, read_token(given.token_file, tls), tls)
    read_first.start(STARTED, given.go_on, listen)
    return 0
