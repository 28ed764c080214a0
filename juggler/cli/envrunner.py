"""`juggler envrunner`: samples for a driver on another host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from juggler.cli.arguments import Flag, WorkerArguments, parse, report_errors
from juggler.cli.reattaching import work
from juggler.runtime.actors.endpoints import split_address


@dataclass(kw_only=True)
class Arguments(WorkerArguments):
    """Sample for the driver of a run, until the driver sends this worker home."""

    gateway: str = ""
    """Accept simulators at exactly this address, HOST:PORT or unix:PATH, instead of making
    environments. PORT 0: any free port."""

    insecure: Flag = False
    """With --gateway: listen beyond loopback without TLS or without a token."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "envrunner")
    return report_errors("envrunner", lambda: _work(given))


def _work(given: Arguments) -> int:
    from juggler.envrunner.program import EnvRunnerProgram, GatewayAddress

    gateway = None
    if given.gateway:
        from juggler.gateway.runner import main

        if not given.gateway.startswith("unix:"):
            split_address(given.gateway)
        gateway = GatewayAddress(given.gateway, given.insecure)
    else:
        from juggler.envrunner.envrunner_worker import main
    contact = given.contact("envrunner")
    program = EnvRunnerProgram(contact, gateway=gateway)
    work(contact, lambda: main(program))
    return 0
