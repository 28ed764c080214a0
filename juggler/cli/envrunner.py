"""`juggler envrunner`: samples for a driver on another host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from juggler.cli.arguments import WorkerArguments, parse, report_errors
from juggler.cli.reattaching import work


@dataclass(kw_only=True)
class Arguments(WorkerArguments):
    """Sample for the driver of a run, until it sends this worker home."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "envrunner")
    return report_errors("envrunner", lambda: _work(given))


def _work(given: Arguments) -> int:
    from juggler.envrunner.program import EnvRunnerProgram
    from juggler.envrunner.worker import main

    contact = given.contact("envrunner")
    work(contact, given.reattach_seconds, lambda: main(EnvRunnerProgram(contact)))
    return 0
