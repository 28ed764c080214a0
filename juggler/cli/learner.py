"""`juggler learner`: learns for a driver on another host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from juggler.cli.arguments import parse, report_errors
from juggler.runtime.actors.credentials import read_token


@dataclass(kw_only=True)
class Arguments:
    """Learn for the driver of a run, until it sends this worker home."""

    driver: str
    """Where the driver listens, HOST:PORT."""

    bind: str = "127.0.0.1:0"
    """Where to listen for EnvRunners, HOST:PORT; port 0 takes any."""

    advertise: str = ""
    """How EnvRunners shall dial this learner, where that is not as bound; port 0: as bound."""

    insecure: bool = False
    """Listen beyond loopback without encryption: on a network that you trust."""

    index: int = -1
    """This worker's number among the learners; -1: the driver chooses."""

    token_file: str | None = None
    """A file with the secret of the run; or set JUGGLER_TOKEN."""

    timeout: float = 60.0
    """Seconds to wait for the driver to answer."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "learner")
    return report_errors("learner", lambda: _work(given))


def _work(given: Arguments) -> int:
    from juggler.learner.program import LearnerProgram
    from juggler.learner.worker import main
    from juggler.runtime.actors.endpoints import split_address
    from juggler.runtime.actors.worker import Contact

    split_address(given.driver)
    contact = Contact(
        address=given.driver,
        index=given.index,
        token=read_token(given.token_file),
        timeout=given.timeout,
    )
    main(LearnerProgram(contact, given.bind, given.advertise, given.insecure))
    return 0
