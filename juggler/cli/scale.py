"""`juggler scale`: changes the number of workers during a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from juggler.cli.arguments import command

_ANSWER_SECONDS = 10.0


@dataclass(kw_only=True)
class Arguments:
    """Change the number of workers of a running run.

    Surplus EnvRunners finish their work, so nothing is lost; so do surplus learners of `juggler
    train`.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory of a run of `juggler train` or `juggler launch`, on the host of its driver."""

    env_runners: int | None = None
    """Number of EnvRunners. none: unchanged."""

    learners: int | None = None
    """Number of learners. none: unchanged."""

    evaluators: int | None = None
    """Number of evaluators, in a run of `juggler launch`. none: unchanged."""


def _scale(given: Arguments) -> int:
    from juggler.driver.reporting.run_directory import find_driver
    from juggler.launch.engine import ROLES, Launch, LaunchError, must_allow

    wanted = dict(zip(ROLES, (given.learners, given.env_runners, given.evaluators), strict=True))
    if all(number is None for number in wanted.values()):
        raise LaunchError("give a number: --env-runners N, --learners N or --evaluators N")
    must_allow(wanted)
    run_dir = Path(given.run).absolute()
    # A launched run has files with its numbers; the driver itself cannot start workers elsewhere.
    launched = Launch(run_dir)
    if launched.is_abandoned:
        raise LaunchError(
            f"the `juggler launch` that started {given.run} was killed, so its workers are no "
            "longer managed: repeat that command to continue the run"
        )
    if launched.is_running:
        for role, number in wanted.items():
            if number is not None:
                print(launched.scale(role, number))
        return 0
    # A run of `juggler train` starts its own workers, and is asked for more.
    address = find_driver(run_dir)
    if given.evaluators is not None:
        raise LaunchError(
            "`juggler train` keeps its evaluators: --evaluators is for `juggler launch`"
        )
    runners, learners = _ask(run_dir, address, given.env_runners or 0, given.learners or 0)
    if given.env_runners is not None:
        print(f"EnvRunners: {given.env_runners} instead of {runners}")
    if given.learners is not None:
        print(f"learners: {given.learners} instead of {learners}")
    return 0


def _ask(run_dir: Path, address: str, env_runners: int, learners: int) -> tuple[int, int]:
    """Ask the driver for these numbers of workers; return the former ones."""
    import grpc

    from juggler.driver.monitoring import SCALE_METHOD
    from juggler.driver.reporting.run_directory import RunDirectoryError, not_running
    from juggler.driver.reporting.wording import here
    from juggler.runtime.actors.endpoints import EndpointError, dial
    from juggler.runtime.wire.v1 import status_pb2

    with dial(address) as channel:
        ask: Any = channel.unary_unary(SCALE_METHOD)
        wanted = status_pb2.ScaleRequest(env_runners=env_runners, learners=learners)
        # A driver that ended without deleting its address is no fault of this command.
        try:
            answered = ask(wanted.SerializeToString(), timeout=_ANSWER_SECONDS)
        except grpc.RpcError as error:
            answer: Any = error
            if answer.code() == grpc.StatusCode.UNAVAILABLE:
                raise RunDirectoryError(not_running(run_dir)) from None
            raise EndpointError(f"{here(run_dir)}: {answer.details()}") from None
    reply = status_pb2.ScaleReply.FromString(answered)
    return int(reply.before), int(reply.learners_before)


run = command("scale", Arguments, _scale)
