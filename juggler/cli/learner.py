"""`juggler learner`: learns for a driver on another host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from juggler.cli.arguments import Flag, WorkerArguments, parse, report_errors
from juggler.cli.reattaching import work


@dataclass(kw_only=True)
class Arguments(WorkerArguments):
    """Learn for the driver of a run, until it sends this worker home."""

    bind: str = "127.0.0.1:0"
    """Where to listen for EnvRunners, HOST:PORT; port 0 takes any."""

    advertise: str = ""
    """How EnvRunners shall dial this learner, where that is not as bound; port 0: as bound."""

    insecure: Flag = False
    """Listen beyond loopback even without TLS or without a token, or, TLS or not, as one of several
    learners, which are plain among themselves: on a network that you trust."""

    reflection: Flag = False
    """Let tools such as grpcurl list what this learner's server has."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "learner")
    return report_errors("learner", lambda: _work(given))


def _work(given: Arguments) -> int:
    from juggler.learner.process.learner_worker import main
    from juggler.learner.process.program import LearnerProgram

    contact = given.contact("learner")
    program = LearnerProgram(contact, given.bind, given.advertise, given.insecure, given.reflection)
    work(contact, lambda: main(program))
    return 0
