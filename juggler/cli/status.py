"""`juggler status`: shows the state of a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from juggler.cli.arguments import Flag, parse, report_errors

_EVERY_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_PIPE_COLUMNS = 300  # without a terminal, nothing is cut off


@dataclass(kw_only=True)
class Arguments:
    """Show the state of a run: its workers, versions, rates, step counts and last events. The
    display is renewed every second until the run ends, or until Ctrl-C."""

    where: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DRIVER")]
    """The driver's address, HOST:PORT; or, on its host, the run directory."""

    once: Flag = False
    """Show the state once and stop."""

    json: Flag = False
    """Print one JSON object per line, with everything that is known."""

    token_file: str | None = None
    """A file with the secret of the run; or set JUGGLER_TOKEN_FILE, or JUGGLER_TOKEN."""

    tls: str | None = None
    """A directory with ca.pem, cert.pem and key.pem, as `juggler certs` makes it; or set
    JUGGLER_TLS."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "status")
    return report_errors("status", lambda: _show(given))


def _show(given: Arguments) -> int:
    statuses = _statuses(given)
    first = next(statuses)
    try:
        if given.json:
            from juggler.driver.asking import to_plain

            _print_all(given, first, statuses, lambda each: print(json.dumps(to_plain(each))))
        else:
            _show_tables(given, first, statuses)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the usual way to end it
    return 0


def _show_tables(given: Arguments, first: Any, rest: Iterator[Any]) -> None:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from juggler.cli.status_table import table

    def shown(status: Any) -> RenderableType:
        return table(status, console.width)

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    if given.once or not console.is_terminal:
        return _print_all(given, first, rest, lambda each: console.print(shown(each)))
    with Live(shown(first), console=console, auto_refresh=False) as live:
        for status in rest:
            live.update(shown(status), refresh=True)
    return None


def _print_all(
    given: Arguments, first: Any, rest: Iterator[Any], show: Callable[[Any], None]
) -> None:
    show(first)
    if not given.once:
        for status in rest:
            show(status)
            sys.stdout.flush()


def _statuses(given: Arguments) -> Iterator[Any]:
    """What the driver says, once a second, until it is gone.

    Raises:
        EndpointError: the driver does not answer the first time.
        RunDirectoryError: the run is not running.
    """
    import grpc

    from juggler.driver.asking import ask_status
    from juggler.driver.record.driver_file import find_driver, not_running
    from juggler.driver.record.run_directory import RunDirectoryError
    from juggler.runtime.actors.credentials import read_token
    from juggler.runtime.actors.endpoints import (
        EndpointError,
        dial,
        no_driver,
        split_address,
        why_not_secure,
    )
    from juggler.runtime.actors.tls import read_tls

    run_dir = Path(given.where)
    if not run_dir.is_dir() and ":" not in given.where:
        raise RunDirectoryError(f"{given.where} is neither a directory nor an address HOST:PORT")
    if run_dir.is_dir():
        address = find_driver(run_dir)
    else:
        address = given.where
        split_address(address)
    tls = read_tls(given.tls)
    with dial(address, tls) as channel:
        token = read_token(given.token_file, tls)
        answered = False
        while True:
            try:
                status = ask_status(channel, _ANSWER_SECONDS, token)
            except grpc.RpcError as error:
                answer: Any = error
                gone = answer.code() == grpc.StatusCode.UNAVAILABLE
                if gone and answered:
                    return print("the driver has ended", file=sys.stderr)
                if gone and run_dir.is_dir():
                    raise RunDirectoryError(not_running(run_dir)) from None
                if answer.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise EndpointError(no_driver(address)) from None
                why = why_not_secure(address, "driver", tls) if gone else ""
                raise EndpointError(
                    why or f"no status from {address}: {answer.details()}"
                ) from None
            answered = True
            yield status
            time.sleep(_EVERY_SECONDS)
