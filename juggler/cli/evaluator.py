"""`juggler evaluator`: plays whole episodes for a driver on another host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from juggler.cli.arguments import WorkerArguments, parse, report_errors
from juggler.cli.reattaching import work


@dataclass(kw_only=True)
class Arguments(WorkerArguments):
    """Play whole episodes with the newest weights of a run, as its evaluation_seconds say, until
    the driver sends this worker home. Several evaluators share the episodes among them."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "evaluator")
    return report_errors("evaluator", lambda: _work(given))


def _work(given: Arguments) -> int:
    from juggler.envrunner.envrunner_worker import main
    from juggler.envrunner.program import EVALUATOR, EnvRunnerProgram

    contact = given.contact(EVALUATOR)
    program = EnvRunnerProgram(contact, EVALUATOR)
    work(contact, lambda: main(program))
    return 0
