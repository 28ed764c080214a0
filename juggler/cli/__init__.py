"""The command line, `juggler COMMAND …`, with one file for each command."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time

# Ctrl-C cannot be handled before `command_line` runs, so nothing slow is imported here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

STARTED = time.monotonic()  # when this process began, by the monotonic clock

#: For each command its function, and its line in `juggler --help`.
COMMANDS = {
    "train": ("juggler.cli.train:run", "train on this host, until solved or stopped"),
    "sweep": ("juggler.cli.sweep:run", "look for good settings with many short runs"),
    "tune": ("juggler.cli.tune:run", "find sizes that suit this machine, by short runs"),
    "evaluate": ("juggler.cli.evaluate:run", "play with the policy in a checkpoint, or record it"),
    "status": ("juggler.cli.status:run", "show the state of a run, or list runs"),
    "watch": ("juggler.cli.status:watch", "serve a page about runs, for a browser"),
    "scale": ("juggler.cli.scale:run", "change the number of workers of a run"),
    "plot": ("juggler.cli.plot:run", "draw return, throughput and staleness of runs"),
    "league": ("juggler.cli.league:run", "show the players of a league, and their win rates"),
    "launch": (
        "juggler.cli.launch:run",
        "start a run on several hosts: SSH, Slurm, Swarm or Kubernetes",
    ),
    "driver": ("juggler.cli.driver:run", "coordinate a run whose workers are on other hosts"),
    "worker": ("juggler.cli.worker:run", "sample, learn or play for a driver on another host"),
    "new": ("juggler.cli.new:run", "write a small project that trains"),
    "doctor": ("juggler.cli.doctor:run", "check this machine, a process or a simulator"),
}

#: Aliases: words for a command with its first arguments.
ALIASES = {
    "envrunner": ("worker", "envrunner"),
    "learner": ("worker", "learner"),
    "evaluator": ("worker", "evaluator"),
    "record": ("evaluate", "--record"),
    "runs": ("status", "--runs"),
    "healthcheck": ("doctor", "--health"),
    "check-simulator": ("doctor", "--simulator"),
    "certs": ("launch", "certs"),
}

#: Words that people may try instead of a command.
_OTHER_WORDS = {"resume": "train --resume RUN", "go-on": "train --resume RUN", "run": "train"}

_ELSEWHERE = """\
juggler runs on Linux. On macOS and Windows, use docker (see docs/docker.md). In a checkout:

  docker build -f docker/Dockerfile -t juggler .
  docker run --rm --init -v runs:/runs juggler train cartpole"""


def command_line() -> NoReturn:
    """Run a command as the main program, and exit.

    Workers, whose streams have threads, exit like local ones.
    """
    code: int | str | None
    try:
        _reset_inherited_state()
        code = main()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    if sys.platform == "linux" and _words(sys.argv[1:])[:1] == ["worker"]:
        from juggler.runtime.actors.processes import leave

        leave(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status.

    0: success; 1: failure; 2: wrong arguments; 128 plus a signal's number, such as 130 after
    Ctrl-C.
    """
    if sys.platform != "linux":  # before imports that fail on other systems
        print(_ELSEWHERE, file=sys.stderr)
        return 2
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the output
        return 128 + signal.SIGPIPE


def _reset_inherited_state() -> None:
    """Reopen closed standard streams, and reset blocked or ignored signals."""
    # Otherwise the next opened file would become a standard stream.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if sys.platform == "linux":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getpid() == 1:  # in a container, PID 1 gets only signals with a handler
            from juggler.runtime.actors.stop_signals import ProcessHandler

            signal.signal(signal.SIGTERM, ProcessHandler(_terminate))


def _terminate(number: int) -> NoReturn:
    raise SystemExit(128 + number)


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"juggler {version('juggler')}")
        return 0
    # Messages have the word that was given, even if it is an alias.
    name, arguments = arguments[0], _words(arguments)
    if arguments[0] not in COMMANDS:
        from juggler.runtime.near_matches import closest

        near = _OTHER_WORDS.get(name) or closest(name, [*COMMANDS, *ALIASES])
        hint = f"Did you mean 'juggler {near}'?" if near else ""
        print(f"juggler: there is no command {name!r}. {hint}\n\n{_usage()}", file=sys.stderr)
        return 2
    # Names such as my_module:MyEnvironment are also looked up in the current directory.
    try:
        sys.path.insert(0, os.getcwd())
    except FileNotFoundError:
        print("juggler: the working directory was deleted: cd to another one", file=sys.stderr)
        return 2
    try:
        return _carry_out(arguments)
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to end
        if not hasattr(interrupt, "result"):  # otherwise the run ended normally, with a message
            print(f"juggler {name}: interrupted, left at once", file=sys.stderr)
        return 128 + signal.SIGINT


def _carry_out(arguments: Sequence[str]) -> int:
    """Import and call the function of a command."""
    module, _, function = COMMANDS[arguments[0]][0].partition(":")
    if begins := _begins_a_run(arguments):
        from juggler.runtime.actors import processes

        # The forkserver imports torch, while this process imports the command.
        processes.share_forkserver()
    try:
        status: int = getattr(importlib.import_module(module), function)(arguments[1:])
        return status
    finally:
        if begins:
            processes.release_forkserver()


def _words(arguments: Sequence[str]) -> list[str]:
    """Replace an alias by its command."""
    return [*ALIASES.get(arguments[0], arguments[:1]), *arguments[1:]] if arguments else []


def _begins_a_run(arguments: Sequence[str]) -> bool:
    """Return whether a command starts its own workers."""
    others = ("-h", "--help", "--list", "--seeds")
    return arguments[0] == "train" and not any(
        each.partition("=")[0] in others for each in arguments
    )


def _usage() -> str:
    lines = "\n".join(f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items())
    how = "juggler COMMAND --help shows its options. To start: juggler train cartpole"
    return f"usage: juggler COMMAND [OPTIONS]\n\n{lines}\n\n{how}"
