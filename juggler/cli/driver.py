"""`juggler driver`: a run whose workers dial in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from juggler.cli.arguments import (
    Flag,
    keys_given,
    parse_first,
    parse_rest,
    process_started,
    report_errors,
)
from juggler.cli.monitoring_arguments import MonitoringArguments
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.driver import Listen
from juggler.driver.given_config import load_given
from juggler.driver.record.run_directory import has_checkpoint
from juggler.driver.starting import resume_run, start_run
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.checkpoints.checkpoint import Checkpoint, read


@dataclass(kw_only=True)
class Arguments(MonitoringArguments):
    """Drive a run. Workers dial in with `juggler envrunner`, `juggler learner` and `juggler
    evaluator`, at any time."""

    config: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CONFIG]")] = None
    """A configuration that ships with Juggler, or a .toml file. Options override its values."""

    bind: str = "127.0.0.1:5005"
    """Address to listen on, HOST:PORT."""

    token_file: str | None = None
    """A file with the secret that workers must show; or set JUGGLER_TOKEN_FILE, or JUGGLER_TOKEN.
    """

    tls: str | None = None
    """A directory with ca.pem, cert.pem, key.pem and perhaps a token, as `juggler certs` makes it;
    or set JUGGLER_TLS."""

    insecure: Flag = False
    """Listen beyond loopback without TLS or without a token: only on a network that you trust."""

    resume: str | None = None
    """Continue the run in this directory from its newest checkpoint, unless it has reached its
    goal."""

    go_on: Flag = False
    """Continue the run in --run-dir from its newest checkpoint if there is one, else begin it: for
    supervisors that restart a driver with the same command."""

    run: RunConfig = field(default_factory=RunConfig)


def run(arguments: Sequence[str]) -> int:
    started = process_started()
    return report_errors("driver", lambda: _drive(arguments, started))


@dataclass(frozen=True, slots=True)
class Given:
    """What the arguments say.

    Attributes:
        arguments: checked.
        keys: of the configuration, that somebody gave.
        checkpoint: to go on from; None: a new run.
    """

    arguments: Arguments
    keys: frozenset[str]
    checkpoint: Checkpoint | None


def read_arguments(arguments: Sequence[str]) -> Given:
    """Parse and check the arguments, and the configuration that they name.

    Raises:
        ConfigError: something in them cannot be.
    """
    first, algorithm = parse_first(Arguments, arguments, "driver")
    if first.resume is not None and first.config is not None:
        raise ConfigError("give a configuration or --resume, not both")
    if first.go_on:
        if first.resume is not None or first.run.driver.run_dir is None:
            raise ConfigError("--go-on needs --run-dir, and cannot be used with --resume")
        if has_checkpoint(Path(first.run.driver.run_dir)):
            first.resume = first.run.driver.run_dir
    if first.resume is not None:
        checkpoint = read(Path(first.resume))
        base = RunConfig.from_flat(checkpoint.config, where=first.resume)
        keys = frozenset(checkpoint.config)
    else:
        checkpoint = None
        base, keys = load_given(first.config, algorithm)
    given = parse_rest(Arguments, arguments, "driver", Arguments(run=base))
    given.run.validate()
    for key, plain in (("num_evaluators", 1), ("evaluation_video", 0)):
        if (value := getattr(given.run.driver, key)) != plain:
            raise ConfigError(
                f"{key} = {value}: this is for evaluators of the driver's own host, and here they "
                f"dial in; leave it at {plain}"
            )
    given.resume = first.resume
    return Given(given, keys | keys_given(arguments), checkpoint)


def _drive(arguments: Sequence[str], started: float) -> int:
    read_first = read_arguments(arguments)
    given, checkpoint = read_first.arguments, read_first.checkpoint
    tls = read_tls(given.tls)
    listen = Listen(given.bind, given.insecure, read_token(given.token_file, tls), tls)
    monitoring = given.monitoring(given.insecure, listen.token, listen.tls)
    if checkpoint is not None:
        resume_run(
            Path(given.resume or ""),
            checkpoint,
            given.run,
            started=started,
            listen=listen,
            monitoring=monitoring,
        )
    else:
        start_run(
            given.run,
            read_first.keys,
            started=started,
            over=given.go_on,
            listen=listen,
            monitoring=monitoring,
        )
    return 0
