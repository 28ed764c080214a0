"""`juggler worker ROLE`: works for a driver on another host."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from juggler.cli.arguments import PREDECESSOR, Flag, WorkerArguments, choose, command
from juggler.runtime.actors.attachment import Contact
from juggler.runtime.actors.endpoints import split_address
from juggler.runtime.actors.processes import must_end
from juggler.runtime.actors.worker import DriverLost

_USAGE: Final = """\
usage: juggler worker ROLE --driver HOST:PORT [OPTIONS]

  envrunner    sample for the driver of a run; or, with --gateway, serve simulators
  learner      learn from what EnvRunners sample
  evaluator    play whole episodes with the newest weights

juggler worker ROLE --help shows the options. `juggler ROLE` is the same."""
_LEAVE_SECONDS: Final = 20.0  # for finalizers, which may be slow on a busy machine


@dataclass(kw_only=True)
class EnvRunnerArguments(WorkerArguments):
    """Sample for the driver of a run, until the driver ends it."""

    gateway: str = ""
    """Accept simulators at exactly this address, HOST:PORT or unix:PATH, instead of making
    environments. PORT 0: any free port."""

    insecure: Flag = False
    """With --gateway: listen beyond loopback without TLS or without a token."""


@dataclass(kw_only=True)
class LearnerArguments(WorkerArguments):
    """Learn for the driver of a run, until the driver ends it."""

    bind: str = "127.0.0.1:0"
    """Address to listen on for EnvRunners, HOST:PORT. Port 0: any free port."""

    advertise: str = ""
    """Address at which EnvRunners dial this learner, if it differs from --bind. Port 0: the bound
    port. none: the name of this host, if --bind is 0.0.0.0."""

    insecure: Flag = False
    """Listen beyond loopback without TLS or without a token, or as one of several learners, whose
    connections to each other are not encrypted even with TLS: only on a network that you trust."""

    reflection: Flag = False
    """Let tools such as grpcurl list the services of this learner."""


@dataclass(kw_only=True)
class EvaluatorArguments(WorkerArguments):
    """Play whole episodes with the newest weights of a run.

    Evaluations take place every evaluation_seconds. Several evaluators share the episodes, until
    the driver ends them.
    """


def _sample(given: EnvRunnerArguments) -> int:
    from juggler.envrunner.envrunner_program import EnvRunnerProgram, GatewayAddress

    gateway = None
    if given.gateway:
        from juggler.gateway.gateway_worker import main

        if not given.gateway.startswith("unix:"):
            split_address(given.gateway)
        gateway = GatewayAddress(given.gateway, given.insecure)
    else:
        from juggler.envrunner.envrunner_worker import main
    contact = given.contact("envrunner")
    program = EnvRunnerProgram(contact, gateway=gateway)
    return work(contact, lambda: main(program))


def _learn(given: LearnerArguments) -> int:
    from juggler.learner.process.learner_program import LearnerProgram
    from juggler.learner.process.learner_worker import main

    if given.advertise:
        split_address(given.advertise)
    contact = given.contact("learner")
    advertise = given.advertise
    if not advertise and split_address(given.bind)[0] in ("0.0.0.0", "::"):
        advertise = f"{socket.gethostname()}:0"
    program = LearnerProgram(contact, given.bind, advertise, given.insecure, given.reflection)
    return work(contact, lambda: main(program))


def _play(given: EvaluatorArguments) -> int:
    from juggler.envrunner.envrunner_program import EVALUATOR, EnvRunnerProgram
    from juggler.envrunner.envrunner_worker import main

    contact = given.contact(EVALUATOR)
    program = EnvRunnerProgram(contact, EVALUATOR)
    return work(contact, lambda: main(program))


def work(contact: Contact, main: Callable[[], None]) -> int:
    """Work until the run ends; start over if the driver is lost.

    The new program waits for a driver, and inherits only a learner's state. Returns 0, a command's
    status.

    Raises:
        DriverLost: the worker does not wait for another driver.
    """
    try:
        main()
        return 0
    except DriverLost as lost:
        if not contact.reattach_seconds:
            raise
        os.environ[PREDECESSOR] = lost.incarnation
        _restart()
    except BaseException:
        must_end(_LEAVE_SECONDS)
        raise


def _restart() -> NoReturn:
    """Replace this process by the same command."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


_ROLES: Final = {
    "envrunner": command("envrunner", EnvRunnerArguments, _sample),
    "learner": command("learner", LearnerArguments, _learn),
    "evaluator": command("evaluator", EvaluatorArguments, _play),
}
run = choose("worker", "role", _USAGE, _ROLES)
