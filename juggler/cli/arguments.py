"""Shared parts of the commands: options, their values, and errors."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, make_dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import docstring_parser
import tyro
from rich.console import Console
from rich.table import Table

from juggler.driver.config import ConfigError, RunConfig, instead_of, must_suit
from juggler.driver.config_files import read_toml
from juggler.driver.monitoring import MonitoringOptions
from juggler.driver.reporting.run_directory import CONFIG_FILE, find_driver_from_elsewhere
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.optim.config import Scheduled
from juggler.runtime.actors.attachment import Contact, describe, explains_itself
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.endpoints import EndpointError, split_address
from juggler.runtime.actors.health import Health
from juggler.runtime.actors.logs import LogFormat, WorkerLog
from juggler.runtime.actors.tls import Tls, read_tls
from juggler.runtime.near_matches import all_of, nearest
from juggler.runtime.streams.shared_directory import shared_directory
from juggler.runtime.user_tracebacks import traceback_of
from juggler.runtime.wrong_value import misfit

T = TypeVar("T")
C = TypeVar("C", bound="ConfigArguments")


def registry_of_values(*, checked: bool) -> tyro.constructors.ConstructorRegistry:
    """Make rules for values; without `checked`, a wrong value is None."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def values(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        if (rule := _rule_for(info.type)) is None:
            return None
        metavar, read, show = rule

        # The first time, defaults are unknown, so nothing is refused.
        def leniently(given: list[str]) -> Any:
            with suppress(ValueError):
                return read(given)

        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*" if read is _schedule else 1,
            metavar=metavar,
            instance_from_str=read if checked else leniently,
            is_instance=lambda value: True,  # configurations are checked elsewhere
            str_from_instance=show,
        )

    return registry


def _rule_for(
    kind: Any,
) -> tuple[str, Callable[[list[str]], Any], Callable[[Any], list[str]]] | None:
    """Return a type's metavar, parser and formatter; None: tyro's own."""
    words = get_args(kind)
    kinds = [each for each in words if each is not NoneType]
    if get_origin(kind) is Literal:  # an error names the nearest word
        return f"{{{','.join(words)}}}", lambda given: _word(given[0], kind), _shown
    if kind is dict or get_origin(kind) is dict:
        return "JSON", _from_json, _shown
    if set(kinds) == {float, dict[str, float]}:
        return "FLOAT|JSON", _number_or_table, _shown
    if kind == Scheduled:  # a number, or the pairs of a schedule, one after the other
        return "FLOAT|STEP FLOAT STEP FLOAT ...", _schedule, _shown
    # As in files, "none" means None, and also an empty text, which is shown that way.
    optional = len(kinds) == 1 and NoneType in words
    one, nothing = (kinds[0], None) if optional else (kind, "")
    if one not in (str, int, float):
        return None
    has_none = optional or one is str
    parse = lambda given: nothing if has_none and given[0] == "none" else _number(given[0], one)  # noqa: E731
    return one.__name__.upper(), parse, _shown


def _shown(value: Any) -> list[str]:
    """Return the words of an option for a value."""
    if isinstance(value, dict):
        return [json.dumps(value)]
    if isinstance(value, list):  # a schedule
        return [str(each) for pair in value for each in pair]
    return ["none" if value in (None, "") else str(value)]


def _word(given: str, kind: Any) -> str:
    if given not in get_args(kind):
        raise ValueError(misfit(kind, given))
    return given


def _number(given: str, kind: type[T]) -> T:
    with suppress(ValueError):
        return kind(given)  # type: ignore[call-arg]
    try:
        if not float(given).is_integer():  # 1e6 is a whole number, too
            raise ValueError
        return kind(float(given))  # type: ignore[call-arg]
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise ValueError(f"expected {expected}, not {given!r}") from None


def _schedule(given: list[str]) -> float | list[tuple[float, float]]:
    try:
        numbers = [float(each) for each in given]
        if len(numbers) == 1:
            return numbers[0]
        return list(zip(numbers[::2], numbers[1::2], strict=True))
    except ValueError:
        hint = "; other arguments go before the options" if len(given) > 1 else ""
        raise ValueError(
            "expected a number, or pairs of a step and a value, as in 0 1e-3 1000000 1e-4, "
            f"not {' '.join(given)!r}{hint}"
        ) from None


def _number_or_table(arguments: list[str]) -> float | dict[str, Any] | None:
    if arguments[0] == "none":
        return None
    if not arguments[0].lstrip().startswith("{"):
        return _number(arguments[0], float)
    table = _from_json(arguments)
    for name, value in table.items():
        if type(value) not in (int, float):
            raise ValueError(f"{name}: expected a number, not {value!r}")
    return {name: float(value) for name, value in table.items()}


def _from_json(arguments: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(arguments[0])
    except json.JSONDecodeError as error:
        message = f"expected a JSON object, as in '{{\"key\": 1}}', not {arguments[0]!r} ({error})"
        raise ValueError(message) from error
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object, as in '{\"key\": 1}'")
    return value


#: Environment variable of a program that replaces a worker: the former incarnation.
PREDECESSOR: Final = "JUGGLER_PREDECESSOR"
_FIRST_ANSWER_SECONDS: Final = 60.0  # time for a driver to answer a worker that has not lost one
#: A line break that ends neither a paragraph nor an item of a list.
_WITHIN: Final = re.compile(r"(?<!\n)\n(?!\n|- )")


@contextmanager
def whole_paragraphs() -> Iterator[None]:
    """Have tyro read docstrings with joined lines.

    By default it breaks a line wherever the next one is indented.
    """
    parse = docstring_parser.parse_from_object

    def joined(*arguments: Any, **options: Any) -> docstring_parser.Docstring:
        found = parse(*arguments, **options)
        for each in found.params:
            if each.description:
                text = _WITHIN.sub(" ", inspect.cleandoc(each.description))
                each.description = text.replace("{algorithms}", ", ".join(ALGORITHMS))
        return found

    docstring_parser.parse_from_object = joined
    try:
        yield
    finally:
        docstring_parser.parse_from_object = parse


Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(kw_only=True)
class AccessArguments:
    """Credentials of a process of a run."""

    token_file: str | None = None
    """File with the run's token; or set JUGGLER_TOKEN_FILE, or JUGGLER_TOKEN."""

    tls: str | None = None
    """Directory with ca.pem, cert.pem, key.pem and optionally a token, made by `juggler certs`; or
    set JUGGLER_TLS."""


@dataclass(kw_only=True)
class WorkerArguments(AccessArguments):
    """How a worker on another host reaches its driver."""

    driver: str
    """Address of the driver, HOST:PORT; or the run directory, if this host shares its file system.
    """

    index: int = -1
    """Index of this worker within its role. -1: the driver chooses."""

    reattach_seconds: float = 600.0
    """Seconds to wait for a lost driver or its successor, and to retry a driver that has no room.
    0: leave at once."""

    health_bind: str = ""
    """Serve health checks at this address, HOST:PORT, without TLS: for probes and `juggler
    healthcheck`."""

    log_format: LogFormat = "text"
    """Format of this process's messages on stderr. json: one object per line."""

    def contact(self, role: str) -> Contact:
        """Return how to reach the driver; start health checks.

        Raises:
            EndpointError: an address is malformed, or cannot be bound; or the directory that
                containers share cannot be used.
            RunDirectoryError: the run in the directory has no driver.
            ValueError: the token or the directory for TLS cannot be used.
        """
        # Also false for NaN, with which gRPC would fail much later.
        if not self.reattach_seconds >= 0:
            raise ValueError("--reattach-seconds must be at least 0")
        predecessor = os.environ.pop(PREDECESSOR, "")
        timeout = self.reattach_seconds if predecessor else _FIRST_ANSWER_SECONDS
        address = self.driver
        log = WorkerLog(role, self.log_format)
        # A run that has not started yet has no directory.
        if Path(address).is_dir() or (":" not in address and os.sep in address):
            address = find_driver_from_elsewhere(Path(address), timeout, log.info)
        split_address(address)
        shared_directory()
        tls = read_tls(self.tls)
        # Served before the driver is dialed: a probe may ask while this worker waits for it.
        health = Health() if self.health_bind else None
        if health is not None:
            health.serve(self.health_bind)
        return Contact(
            address=address,
            index=self.index,
            token=read_token(self.token_file, tls),
            tls=tls,
            timeout=timeout,
            health=health,
            reattach_seconds=self.reattach_seconds,
            predecessor=predecessor,
            log=log,
        )


@dataclass(kw_only=True)
class ConfigArguments:
    """A configuration, and options for its keys."""

    config: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[CONFIG]")] = None
    """Name of a shipped configuration, or a .toml file. Options override its values."""

    run: RunConfig = field(default_factory=RunConfig)


def parse(
    kind: type[T],
    arguments: Sequence[str],
    command: str,
    default: T | None = None,
    *,
    checked: bool = True,
) -> T:
    """Parse flat options into a dataclass; exit with 2 if wrong.

    Options that can only be switched on are a `Flag`; other booleans may be true or false in a
    file. Without `checked`, invalid values are read as None.
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
    """Turn a builder's name, as in `--league rllib`, into a table."""
    words = _split(arguments, "--league=")
    return [
        json.dumps({"builder": each}) if before == "--league" and each.lstrip()[:1] != "{" else each
        for before, each in zip(["", *words], words, strict=False)
    ]


def parse_first(kind: type[C], arguments: Sequence[str], command: str) -> tuple[C, str | None]:
    """Parse configuration and algorithm, which decide the options.

    Accepts every option of shipped algorithms, or of the user's own algorithm. `parse_rest`
    reports wrong values, because it knows the defaults.

    Raises:
        ConfigError: an option belongs to another library, or is a key of the model; or the
            algorithm is unknown.
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
    _check_booleans(arguments, run)
    first = parse(kind, asked, command, kind(run=run), checked=False)
    return first, first.run.learner.algorithm or None


def _check_booleans(arguments: Sequence[str], run: RunConfig) -> None:
    """Check that boolean options have no value, unlike in files."""
    booleans = {key for key, value in run.flat().items() if isinstance(value, bool)}
    for option, word in pairwise(_split(arguments, "--")):
        if _key(option) in booleans and word.lower() in ("true", "false"):
            no = option.replace("--", "--no-", 1)
            raise ConfigError(f"{option} {word}: give {option} for true, and {no} for false")


def _split(arguments: Sequence[str], options: str) -> list[str]:
    """Split values from options that begin like this: "--lr=1"."""
    words: list[str] = []
    for each in arguments:
        words += each.split("=", 1) if each.startswith(options) else [each]
    return words


def _own_algorithm(arguments: Sequence[str]) -> str:
    """Return the user's own algorithm in a command, or ""."""
    algorithm = ""
    for word, after in pairwise([*_split(arguments, "--"), ""]):
        if word == "--algorithm":
            algorithm = after
            break
        path = Path(after) / CONFIG_FILE if word in ("--resume", "--run-dir") else Path(word)
        if path.suffix == ".toml" and path.is_file():
            algorithm = str(read_toml(path).get("algorithm", ""))
    return algorithm if ":" in algorithm else ""


def parse_rest(kind: type[C], arguments: Sequence[str], command: str, base: RunConfig) -> C:
    """Parse and check all options, with this configuration's values as defaults."""
    for argument in arguments:
        if key := _key(argument):
            must_suit(key, base.learner.algorithm, argument)
    given = parse(kind, arguments, command, kind(run=base))
    given.run.validate()
    return given


def _key(argument: str) -> str:
    """Return the key that an option sets, or ""."""
    if not argument.startswith("--"):
        return ""
    return argument.removeprefix("--").partition("=")[0].replace("-", "_")


def keys_given(arguments: Sequence[str]) -> frozenset[str]:
    """Return the keys that options set, valid or not."""
    names = {_key(argument) for argument in arguments}
    return frozenset(names | {name.removeprefix("no_") for name in names})


def values_given(run: RunConfig, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of the keys that options set."""
    keys = keys_given(arguments)
    return {key: value for key, value in run.flat().items() if key in keys}


def must_not_be_combined(
    config: str | None, arguments: Sequence[str], resumed: str, may_change: Sequence[str]
) -> None:
    """Check that --resume has no options that would be ignored."""
    others = sorted(keys_given(arguments) - {"", "resume", *may_change})
    if config is not None:
        others.insert(0, "CONFIG")
    if others:
        changed = all_of(f"--{key}" for key in may_change)
        raise ConfigError(
            f"--resume continues {resumed}, and only {changed} may change: leave out "
            f"{all_of(others)}"
        )


class PlotError(Exception):
    """A run that cannot be drawn; the message has the reason."""


def report_errors(command: str, work: Callable[[], int]) -> int:
    """Run a command; print errors of the user; return its status."""
    from juggler.driver.driver import RunFailed
    from juggler.driver.reporting.run_directory import RunDirectoryError
    from juggler.experiments.sweep import SweepFailed
    from juggler.launch.engine import LaunchError
    from juggler.runtime.checkpoints.checkpoint import CheckpointError

    expected = CheckpointError, RunDirectoryError, RunFailed
    try:
        return work()
    except ConfigError as error:
        # User code that raised while its configuration was checked.
        traceback = getattr(error, "traceback", "") or getattr(error.__cause__, "traceback", "")
        if traceback:
            print(traceback, file=sys.stderr)
        for line in str(error).splitlines():
            print(f"juggler {command}: {line}", file=sys.stderr)
        return 2
    except (*expected, EndpointError, PlotError, SweepFailed, LaunchError) as error:
        print(f"juggler {command}: {error}", file=sys.stderr)
        return 1
    # Its reader has closed stdout, which `main` handles.
    except BrokenPipeError:
        raise
    except Exception as error:
        text = traceback_of(error)  # from user code, such as a callback
        if explains_itself(error):
            failure = describe(error)
            text = f"juggler {command}: {failure.message}\n{failure.traceback}"
        print(text.rstrip(), file=sys.stderr)
        return 1


def command(
    name: str,
    kind: type[T],
    work: Callable[[T], int],
    modes: Mapping[str, Callable[[Sequence[str]], int]] | None = None,
) -> Callable[[Sequence[str]], int]:
    """Make the function of a command; options in `modes` replace it."""

    def run(arguments: Sequence[str]) -> int:
        for option, other in (modes or {}).items():
            if option in arguments:
                return other([each for each in arguments if each != option])
        return report_errors(name, lambda: work(parse(kind, arguments, name)))

    return run


PIPE_COLUMNS: Final = 300  # without a terminal, nothing is cut off


def make_console() -> Console:
    """Make a console for tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def make_table(words: Sequence[str], numbers: Sequence[str] = (), *last: str) -> Table:
    """Make a table: columns of words, of numbers, and of words again."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*words, *numbers, *last):
        how: dict[str, Any] = {"justify": "right", "no_wrap": True} if name in numbers else {}
        table.add_column(name, overflow="fold", min_width=min(len(name), 7), **how)
    return table


def choose(
    name: str, what: str, usage: str, choices: Mapping[str, Callable[[Sequence[str]], int]]
) -> Callable[[Sequence[str]], int]:
    """Make the function of a command whose first word chooses another."""

    def run(arguments: Sequence[str]) -> int:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(usage)
            return 0
        word, *rest = arguments
        if word in choices:
            return choices[word](rest)
        print(f"juggler {name}: no {what} {word!r}{nearest(word, choices)}", file=sys.stderr)
        return 2

    return run


@dataclass(kw_only=True)
class MonitoringArguments:
    """Monitoring of a run, in addition to `juggler status`."""

    metrics_bind: str = ""
    """Serve metrics for Prometheus at this address, HOST:PORT, as /metrics: with the driver's TLS
    and token, if it has them, or with neither if --insecure is given. `juggler train` reads the
    token from JUGGLER_TOKEN or JUGGLER_TOKEN_FILE."""

    health_bind: str = ""
    """Also serve health checks at this address, HOST:PORT, without TLS: for probes that cannot use
    it."""

    reflection: Flag = False
    """Let tools such as grpcurl list the services of the driver."""

    def monitoring(
        self, insecure: bool, token: str | None = None, tls: Tls | None = None
    ) -> MonitoringOptions:
        """Make the driver's options from the run's token and TLS files."""
        if insecure:  # for scrapers that only accept an address
            token, tls = "", None
        elif token is None:
            token = read_token(None) if self.metrics_bind else ""
        services = self.metrics_bind, self.health_bind, self.reflection
        return MonitoringOptions(*services, insecure, token, tls)
