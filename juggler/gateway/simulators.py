"""Starts simulators, and restarts copies that end or hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from juggler.envrunner.config import ADDRESS, words_of
from juggler.gateway.sessions import GatewaySession
from juggler.runtime.actors.command_processes import CommandLine
from juggler.runtime.actors.credentials import TOKEN_VARIABLE
from juggler.runtime.actors.supervisor import Exited, RestartPolicy, Supervisor
from juggler.runtime.actors.tls import TLS_VARIABLE

INDEX = "{index}"
#: A simulator that keeps ending before its first step is broken.
_POLICY = RestartPolicy(longest_delay=5.0, quarantine_after=3, most_in_window=1 << 10)
_LOOK_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
_LEAVING_LOOK_SECONDS = 0.02


class SimulatorFailed(RuntimeError):
    """A simulator keeps ending."""

    lasting, traceback = True, ""  # it would fail again, and the message is complete


@dataclass(slots=True)
class _Copy:
    """A copy of the simulator."""

    name: str
    starts: int = 1
    # Its pid, and the last number sent by session id.
    seen: tuple[int, dict[str, int]] = (0, {})
    silent: float = 0.0  # seconds since it last sent or awaited a message
    # Pid of the process that began each of its sessions, by session id.
    made_by: dict[str, int] = field(default_factory=dict)


class Simulators:
    """Keeps copies of a simulator running.

    Each copy dials its own address, which identifies its sessions.

    Args:
        first: number of the first copy in the run.
        logs: directory for their output; "": they share this process's output.
        deadline: seconds without a message after which a copy counts as hanging.
        report: called with lines for the log, in any thread.
        failed: called with the error of a copy that keeps ending.
    """

    def __init__(
        self,
        command: str,
        addresses: Sequence[str],
        first: int,
        logs: str,
        token: str,
        deadline: float,
        report: Callable[[str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._deadline, self._report, self._failed = deadline, report, failed
        self._logs = logs
        self._supervisor = Supervisor(self._ended)
        self._looked_at = time.monotonic()
        self._copies: dict[str, _Copy] = {}  # by the address that only this copy dials
        self._used: set[str] = set()  # ids of sessions that have sent steps
        self._closing = False
        # The copies' addresses are on loopback, without TLS.
        variables = {TLS_VARIABLE: None, TOKEN_VARIABLE: token or None}
        commands: dict[str, CommandLine] = {}
        for number, address in enumerate(addresses, first):
            name, words = f"simulator-{number}", words_of(command)
            words = [each.replace(ADDRESS, address).replace(INDEX, str(number)) for each in words]
            log = Path(logs, f"{name}.log") if logs else None
            self._copies[address] = _Copy(name)
            commands[name] = CommandLine(words, log, variables)
        # All copies are known before the supervisor's thread may report the end of one.
        for name, command_line in commands.items():
            self._supervisor.add(name, command_line, _POLICY)

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    def check(self, sessions: Collection[GatewaySession]) -> list[GatewaySession]:
        """Kill copies that hang; return sessions of copies that have ended.

        Called in each turn of the gateway.
        """
        # At once, as a copy may end soon after its first step.
        for session in sessions:
            if session.last_seq and session.id not in self._used:
                self._used.add(session.id)
                if (used := self._copies.get(session.dialed)) is not None:
                    used.made_by[session.id] = self._supervisor.pids().get(used.name, 0)
                    self._supervisor.of_use(used.name)
        now = time.monotonic()
        if (passed := now - self._looked_at) < _LOOK_SECONDS:
            return []
        self._looked_at = now
        of_copies: dict[str, list[GatewaySession]] = {address: [] for address in self._copies}
        for session in sessions:
            of_copies.get(session.dialed, []).append(session)
        # A copy that has ended cannot resume its sessions, so they need not wait for it.
        pids, ended = self._supervisor.pids(), []
        self._used &= {session.id for session in sessions}
        for address, copy in self._copies.items():
            of_copy, pid = of_copies[address], pids.get(copy.name, 0)
            copy.made_by = {each.id: copy.made_by.get(each.id, pid) for each in of_copy}
            gone = (each for each in of_copy if copy.made_by[each.id] != pid)
            ended += [each for each in gone if each.stream is None]
            seen = pid, {each.id: each.last_seq for each in of_copy}
            # While this process was stopped, a copy may have waited for it.
            copy.silent += min(passed, 2 * _LOOK_SECONDS)
            if seen != copy.seen or any(each.is_owed for each in of_copy):
                copy.silent = 0.0
            copy.seen = seen
            if copy.silent > self._deadline and pid:
                self._report(
                    f"{copy.name} (pid {pid}) has sent nothing for {copy.silent:.0f} s, more than "
                    f"step_deadline_seconds = {self._deadline:g}: it hangs, and is killed",
                )
                self._supervisor.kill(copy.name, pid)
        return ended

    def _ended(self, exited: Exited) -> None:
        """Report the end of a process, in the supervisor's thread."""
        if self._closing:
            return
        if exited.restart_in is not None:
            copy = next(each for each in self._copies.values() if each.name == exited.worker_id)
            copy.starts += 1
            text = f"{copy.name} (pid {exited.pid}) ended: {exited.how}. Starting it again"
            text += f" (start {copy.starts})"
            self._report(text)
            if self._logs:
                with suppress(OSError), Path(self._logs, f"{copy.name}.log").open("a") as log:
                    log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} juggler: {text}\n")
            return None
        output = f". Its output is in {self._logs}/{exited.worker_id}.log" if self._logs else ""
        text = f"{exited.worker_id} keeps ending (the last time: {exited.how}){output}"
        return self._failed(SimulatorFailed(text))

    def stop_restarting(self) -> None:
        """Let copies that end from now on stay down, without a report."""
        self._closing = True
        self._supervisor.stop_restarting()

    def close(self) -> None:
        """Give copies a moment to leave, then kill the rest."""
        self.stop_restarting()
        end = time.monotonic() + _LEAVE_SECONDS
        # Copies die with the supervisor's thread, which closing ends.
        while self._supervisor.pids() and time.monotonic() < end:
            time.sleep(_LEAVING_LOOK_SECONDS)
        self._supervisor.close(0.0)
