"""`juggler learner`: learns for a driver on another host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from juggler.cli.arguments import Flag, WorkerArguments, parse, report_errors
from juggler.cli.reattaching import work
from juggler.runtime.actors.endpoints import split_address


@dataclass(kw_only=True)
class Arguments(WorkerArguments):
    """Learn for the driver of a run, until the driver sends this worker home."""

    bind: str = "127.0.0.1:0"
    """Address to listen on for EnvRunners, HOST:PORT. Port 0: any free port."""

    advertise: str = ""
    """Address at which EnvRunners dial this learner, if it differs from --bind. Port 0: the bound
    port. none: the name of this host, if --bind is 0.0.0.0."""

    insecure: Flag = False
    """Listen beyond loopback without TLS or without a token, or, with or without TLS, as one of
    several learners, whose connections to each other are not encrypted: only on a network that you
    trust."""

    reflection: Flag = False
    """Let tools such as grpcurl list the services of this learner."""

    receivers: int = 0
    """How many processes receive episodes for this learner, on cores of their own, and hand them
    over in shared memory. They listen at the port after that of --bind, or at any free port if
    --bind has port 0. Without receivers, the learner receives by itself."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "learner")
    return report_errors("learner", lambda: _work(given))


def _work(given: Arguments) -> int:
    from juggler.learner.process.learner_worker import main
    from juggler.learner.process.program import LearnerProgram, must_allow_receivers

    must_allow_receivers(given.receivers)
    contact = given.contact("learner")
    advertise = given.advertise
    if not advertise and split_address(given.bind)[0] in ("0.0.0.0", "::"):
        advertise = f"{socket.gethostname()}:0"
    program = LearnerProgram(
        contact,
        given.bind,
        advertise,
        given.insecure,
        given.reflection,
        receivers=given.receivers,
    )
    work(contact, lambda: main(program))
    return 0
