"""What the commands share: tyro's settings, options of workers, and errors for people."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import docstring_parser
import tyro

from juggler.cli.option_values import registry_of_values
from juggler.cli.reattaching import PREDECESSOR
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_keys import instead_of, must_suit
from juggler.driver.given_config import read_toml
from juggler.driver.record.driver_file import find_driver_from_elsewhere
from juggler.driver.record.run_directory import CONFIG_FILE
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.runtime.actors.attachment import describe, explains_itself
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.endpoints import EndpointError, split_address
from juggler.runtime.actors.health import Health
from juggler.runtime.actors.logs import LogFormat, WorkerLog
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.actors.worker import Contact
from juggler.runtime.nearest import all_of
from juggler.runtime.own_frames import traceback_of
from juggler.runtime.streams.shared_directory import shared_directory

#: A line break that ends neither a paragraph nor an item of a list.
_WITHIN: Final = re.compile(r"(?<!\n)\n(?!\n|- )")


@contextmanager
def whole_paragraphs() -> Iterator[None]:
    """Within, tyro reads docstrings whose lines are joined. By itself it breaks a line wherever the
    next one in the file is indented, as those of attributes are."""
    parse = docstring_parser.parse_from_object

    def joined(*arguments: Any, **options: Any) -> docstring_parser.Docstring:
        found = parse(*arguments, **options)
        for each in found.params:
            if each.description:
                each.description = _WITHIN.sub(" ", inspect.cleandoc(each.description))
        return found

    docstring_parser.parse_from_object = joined
    try:
        yield
    finally:
        docstring_parser.parse_from_object = parse


T = TypeVar("T")
Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(kw_only=True)
class WorkerArguments:
    """How a worker on another host finds its driver."""

    driver: str
    """Address of the driver, HOST:PORT; or the run directory, if this host shares its file system.
    """

    index: int = -1
    """This worker's number among those of its role. -1: the driver chooses."""

    token_file: str | None = None
    """A file with the secret of the run; or set JUGGLER_TOKEN_FILE, or JUGGLER_TOKEN."""

    tls: str | None = None
    """A directory with ca.pem, cert.pem, key.pem and perhaps a token, as `juggler certs` makes it;
    or set JUGGLER_TLS."""

    timeout: float = 60.0
    """How many seconds to wait for the driver's first answer."""

    reattach_seconds: float = 600.0
    """How long to look for a driver that is lost, or for its successor, and to retry a driver that
    has no room. 0: leave at once."""

    health_bind: str = ""
    """Serve health checks at this address, HOST:PORT, without TLS: for probes and `juggler
    healthcheck`."""

    log_format: LogFormat = "text"
    """Format of this process's own messages on stderr. json: one object per line."""

    def contact(self, role: str) -> Contact:
        """How this worker reaches its driver. From now on its process answers health checks.

        Raises:
            EndpointError: an address is malformed, or cannot be listened on; or the directory that
                containers share cannot be used.
            RunDirectoryError: the run in the directory has no driver.
            ValueError: the token, or the directory for TLS, cannot be read or used.
        """
        address = self.driver
        log = WorkerLog(role, self.log_format)
        # A run that has yet to begin has no directory.
        if Path(address).is_dir() or (":" not in address and os.sep in address):
            address = find_driver_from_elsewhere(Path(address), self.timeout, log.info)
        split_address(address)
        shared_directory()
        tls = read_tls(self.tls)
        health = None
        if self.health_bind:
            health = Health()
            health.serve(self.health_bind)
        return Contact(
            address=address,
            index=self.index,
            token=read_token(self.token_file, tls),
            tls=tls,
            timeout=self.timeout,
            health=health,
            reattach_seconds=self.reattach_seconds,
            predecessor=os.environ.pop(PREDECESSOR, ""),
            log=log,
        )


def parse(
    kind: type[T],
    arguments: Sequence[str],
    command: str,
    default: T | None = None,
    *,
    checked: bool = True,
) -> T:
    """Parse options into a dataclass, under flat names. Exits with 2 if they are wrong.

    Options that can only be switched on are a `Flag`; other booleans may be set by a file in either
    way. What is not `checked` is read as None where it is no value of its option.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    # `from` is a keyword of Python, so the field has another name.
    arguments = [re.sub(r"^--from(?=$|=)", "--from-checkpoint", each) for each in arguments]
    arguments = _with_a_table_for_the_league(arguments)
    with whole_paragraphs():
        parsed: T = tyro.cli(
            kind,
            args=arguments,
            prog=f"juggler {command}",
            config=(tyro.conf.OmitArgPrefixes,),
            registry=registry_of_values(checked=checked),
            **options,
        )
    return parsed


def _with_a_table_for_the_league(arguments: Sequence[str]) -> list[str]:
    """The name of a builder alone, as in `--league rllib`, stands for a table with it."""
    found: list[str] = []
    for before, each in zip(["", *arguments], arguments, strict=False):
        option, equals, value = each.partition("=")
        if before == "--league" and not each.lstrip().startswith("{"):
            each = json.dumps({"builder": each})
        elif option == "--league" and equals and not value.lstrip().startswith("{"):
            each = f"--league={json.dumps({'builder': value})}"
        found.append(each)
    return found


def parse_first(kind: type[T], arguments: Sequence[str], command: str) -> tuple[T, str | None]:
    """Parse what decides which options there are and what their defaults are: the configuration,
    and the algorithm if it is given. At this point, every option of every algorithm that ships is
    accepted; or, where the command is about an algorithm of somebody's own, the options of that.
    Wrong values are told by `parse_rest`, which knows this run's defaults.

    Args:
        kind: a dataclass with a RunConfig as `run`.
        arguments: the command's arguments.
        command: the command's name.

    Raises:
        ConfigError: an option belongs to another library, or is a key of the model; or there is no
            such algorithm.
    """
    if own := _own_algorithm(arguments):
        bases = [type(RunConfig.from_flat({"algorithm": own}).learner)]
    else:
        configs = {each.config: None for each in ALGORITHMS.values()}
        # Subclasses before their bases.
        bases = sorted(configs, key=lambda each: -len(each.__mro__))
    known = {key.name for base in bases for key in fields(base)}
    for argument in arguments:
        if (key := _key(argument)) not in known and (answer := instead_of(key)):
            raise ConfigError(f"{argument.partition('=')[0]}{answer}")
    every = make_dataclass("EveryAlgorithm", [("algorithm", str, "")], bases=tuple(bases))
    asked = [argument for argument in arguments if argument not in ("-h", "--help")]
    run = RunConfig(learner=every())
    _must_say_booleans_alone(arguments, run)
    first = parse(kind, asked, command, kind(run=run), checked=False)  # type: ignore[call-arg]
    return first, first.run.learner.algorithm or None  # type: ignore[attr-defined]


def _must_say_booleans_alone(arguments: Sequence[str], run: RunConfig) -> None:
    """
    Raises:
        ConfigError: a key that is true or false has a word behind it, as in a file.
    """
    booleans = {key for key, value in run.flat().items() if isinstance(value, bool)}
    words: list[str] = []
    for each in arguments:
        words += each.split("=", 1) if each.startswith("--") else [each]
    for option, word in pairwise(words):
        if _key(option) in booleans and word.lower() in ("true", "false"):
            no = option.replace("--", "--no-", 1)
            raise ConfigError(f"{option} {word}: give {option} for true, and {no} for false")


def _own_algorithm(arguments: Sequence[str]) -> str:
    """The algorithm of somebody's own that a command names, by an option or else in the file or the
    run that it names; "" where it names one that ships, or none."""
    said = ""
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=False):
        option, _, value = argument.partition("=")
        if option == "--algorithm":
            said = value or after
            break
        if option in ("--resume", "--run-dir"):
            path = Path(value or after) / CONFIG_FILE
        elif argument.endswith(".toml"):
            path = Path(argument)
        else:
            continue
        if path.is_file():
            said = str(read_toml(path).get("algorithm", ""))
    return said if ":" in said else ""


def parse_rest(kind: type[T], arguments: Sequence[str], command: str, default: T) -> T:
    """Parse all options, with the values of a configuration as defaults.

    Args:
        kind: as for `parse_first`.
        arguments: the command's arguments.
        command: the command's name.
        default: has the configuration as `run`.

    Raises:
        ConfigError: an option belongs to another algorithm.
    """
    for argument in arguments:
        if key := _key(argument):
            must_suit(key, default.run.learner.algorithm, argument)  # type: ignore[attr-defined]
    return parse(kind, arguments, command, default)


def _key(argument: str) -> str:
    """The key that an option sets, or "" if the argument is not an option."""
    if not argument.startswith("--"):
        return ""
    return argument.removeprefix("--").partition("=")[0].replace("-", "_")


def keys_given(arguments: Sequence[str]) -> frozenset[str]:
    """The keys that options set, and perhaps names that are not keys."""
    names = {_key(argument) for argument in arguments}
    return frozenset(names | {name.removeprefix("no_") for name in names})


def must_stand_alone(
    config: str | None, arguments: Sequence[str], goes_on: str, may_change: Sequence[str]
) -> None:
    """Check that --resume comes with nothing that would be ignored.

    Args:
        config: that was given; None: none.
        arguments: the command's arguments.
        goes_on: what does, as it was started, for people.
        may_change: keys that may be other ones.

    Raises:
        ConfigError: something else was given.
    """
    others = sorted(keys_given(arguments) - {"", "resume", *may_change})
    if config is not None:
        others.insert(0, "CONFIG")
    if others:
        changed = all_of(f"--{key}" for key in may_change)
        raise ConfigError(
            f"--resume goes on with {goes_on}, with other {changed} at most: leave out "
            f"{all_of(others)}"
        )


def report_errors(command: str, work: Callable[[], int]) -> int:
    """Run a command. Errors that people can fix become one message, and exit status 1 or 2."""
    from juggler.cli.picture_runs import PlotError
    from juggler.driver.driver import RunFailed
    from juggler.driver.record.run_directory import RunDirectoryError
    from juggler.experiments.sweep import SweepFailed
    from juggler.launch.commands import LaunchError
    from juggler.runtime.checkpoints.checkpoint import CheckpointError

    expected = CheckpointError, RunDirectoryError, RunFailed
    try:
        return work()
    except ConfigError as error:
        traceback = getattr(error, "traceback", "") or getattr(error.__cause__, "traceback", "")
        if traceback:
            print(traceback, file=sys.stderr)
        for line in str(error).splitlines():
            print(f"juggler {command}: {line}", file=sys.stderr)
        return 2
    except (*expected, EndpointError, PlotError, SweepFailed, LaunchError) as error:
        print(f"juggler {command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise  # of stdout: its reader has read enough
    except Exception as error:
        if not explains_itself(error):  # of a user's own code, such as a callback
            print(traceback_of(error), end="", file=sys.stderr)
            return 1
        failure = describe(error)
        print(
            f"juggler {command}: {failure.message}\n{failure.traceback}".rstrip(), file=sys.stderr
        )
        return 1


def process_started() -> float:
    """When this process began, in seconds of `time.monotonic`, so that the time of imports counts
    too."""
    try:
        # The name may contain spaces and brackets; the fields after it do not.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.monotonic()
    age = uptime - float(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)
