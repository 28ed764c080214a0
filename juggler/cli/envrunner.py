"""`juggler envrunner`: samples for a driver on another host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from juggler.cli.arguments import parse, report_errors
from juggler.runtime.actors.credentials import read_token


@dataclass(kw_only=True)
class Arguments:
    """Sample for the driver of a run, until it sends this worker home."""

    driver: str
    """Where the driver listens, HOST:PORT."""

    index: int = -1
    """This worker's number among the EnvRunners; -1: the driver chooses."""

    token_file: str | None = None
    """A file with the secret of the run; or set JUGGLER_TOKEN."""

    timeout: float = 60.0
    """Seconds to wait for the driver to answer."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "envrunner")
    return report_errors("envrunner", lambda: _work(given))


def _work(given: Arguments) -> int:
    from juggler.envrunner.program import EnvRunnerProgram
    from juggler.envrunner.worker import main
    from juggler.runtime.actors.endpoints import split_address
    from juggler.runtime.actors.worker import Contact

    split_address(given.driver)
    contact = Contact(
        address=given.driver,
        index=given.index,
        token=read_token(given.token_file),
        timeout=given.timeout,
    )
    main(EnvRunnerProgram(contact))
    return 0
