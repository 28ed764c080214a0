"""`juggler check-simulator`: plays with a simulator, and reports problems."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import tyro
from gymnasium.spaces import Box
from numpy.typing import NDArray

from juggler.cli.arguments import Flag, command
from juggler.cli.findings import Finding, judged, print_finding, status_of
from juggler.driver.config import ConfigError
from juggler.driver.signals import as_exception, signals_become
from juggler.envrunner.config import ADDRESS, check_points, words_of
from juggler.envrunner.setup import RANDOM, may_play
from juggler.gateway.agents import ModuleAssignment
from juggler.gateway.curriculum import Curriculum
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.module_player import ModulePlayer
from juggler.gateway.session_manager import GatewaySettings
from juggler.gateway.sessions import AgentInterface, GatewaySession
from juggler.gateway.standalone_gateway import ALONE, LOOK_SECONDS, StandaloneGateway
from juggler.gateway.step_batches import PlayerRows
from juggler.gateway.transport import Transport
from juggler.runtime.acting.actor import random_actor
from juggler.runtime.actors.command_processes import CommandLine, CommandProcess
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.supervisor import how_it_ended
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.wire.structures import take
from juggler.runtime.wire.trees import Path, Tree, flatten, path_name
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_FEW_STEPS = 20  # after a cut, or to check whether observations change
_RESUME_SECONDS = 15.0
_FEW, _FEW_SECONDS = 3, 10.0  # episodes, and maximum time to wait for them
_LINE_SECONDS = 5.0
_END_SECONDS = 5.0
_SILENT_SECONDS = 20.0  # after its hello or a step: a simulator that sends nothing hangs


@dataclass(kw_only=True)
class Arguments:
    """Play with a simulator like a gateway.

    Reports what the simulator sends.

    Actions are random. The command exits with 1 if the simulator breaks a rule of the protocol, or
    if observations are outside their space.
    """

    simulator: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="HOST:PORT|COMMAND")]
    """HOST:PORT, or unix:PATH, to listen at for a simulator that you start; or a command that
    starts it, with {address} for the address to dial, as in "./game {address}"."""

    steps: int = 1000
    """Number of steps to play, of all agents together."""

    seconds: float = 60.0
    """Maximum duration of the check, in seconds."""

    seed: int = 0
    """Seed from which the seeds of episodes are derived."""

    parameters: dict[str, float] = field(default_factory=dict)
    """Numbers or schedules for the episodes, by name."""

    insecure: Flag = False
    """Listen beyond loopback even without TLS or without a token."""


def _report(given: Arguments) -> int:
    found = check(given, lambda text: print(text, flush=True))
    print()
    for each in found:
        print_finding(each)
    return status_of(found)


def check(given: Arguments, report: Callable[[str], None]) -> list[Finding]:
    """Play with the simulator, and return the findings.

    Raises:
        ConfigError: the command cannot be started, or has no place for the address.
        EndpointError: the gateway cannot listen there.
        KeyboardInterrupt: Ctrl-C ended the check, and the command.
    """
    if given.steps < 1 or not given.seconds > 0:
        raise ConfigError("--steps must be at least 1, and --seconds above 0")
    # Without its {address}, a path is a command, too.
    is_command = bool({*"{ /"} & {*given.simulator}) and not given.simulator.startswith("unix:")
    try:
        words = words_of(given.simulator) if is_command else []
        for name, number in given.parameters.items():
            check_points(name, number)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    work, process, ended = Check(given.steps, report), None, True
    address = _serve(work, given, "127.0.0.1:0" if words else given.simulator)
    # A command in its own session would outlive a check that a signal ends.
    with signals_become(lambda why: work.over.set()) as caught:
        try:
            report(f"takes simulators at {address}")
            # Started once the gateway listens, so that its first attempt succeeds.
            if words:
                process = _started([word.replace(ADDRESS, address) for word in words])
            _wait(work, process, given.seconds)
            if process is not None and "left" in work.why and "failed" not in work.why:
                process.join(_END_SECONDS)  # it said goodbye, so its status is its own
            status = None if process is None else process.exitcode
        finally:
            caught.no_more()
            work.server.close("the check has ended")
            if process is not None:
                ended = _end(process, 0.0 if caught.number else _END_SECONDS)
    # A signal or an error of the gateway leaves findings that mean nothing.
    if caught.number:
        raise as_exception(caught.number)
    if work.failure is not None:
        raise work.failure
    found = [*work.findings()]
    if status and not work.was_cut:
        # Some exit codes have a meaning only for processes of the forkserver.
        how = how_it_ended(status) if status < 0 else f"exit code {status}"
        text = f"it ended by itself: {how}"
        found.append(Finding("command", "problem", text))
    elif not ended:
        text = f"it ran for {_END_SECONDS:.0f} s after the check, and was killed"
        found.append(Finding("command", "warning", text, "end it after the error ENDED"))
    return found


def _serve(work: Check, given: Arguments, address: str) -> str:
    """Start a check's gateway, and return its address."""
    # Random actions are cheap, so each message is answered at once.
    settings = GatewaySettings(
        1 << 12,
        0.0,
        "check",
        Watched.ROW_STEPS,
        _RESUME_SECONDS,
        casting=AnyAgents(remote_only=ALONE),
        curriculum=Curriculum(given.seed, given.parameters),
    )
    tls = read_tls(None)
    work.server = GatewayServer(Transport(read_token(None, tls)), work, settings, work.failed)
    return work.server.start(address, tls, given.insecure)


def _started(words: list[str]) -> CommandProcess:
    try:
        return CommandLine(words).start()
    except OSError as error:
        raise ConfigError(str(error)) from error


def _end(process: CommandProcess, seconds: float) -> bool:
    """Wait for a command, then kill it; return whether it ended."""
    process.join(seconds)
    by_itself = not process.is_alive()
    process.kill()
    process.join()
    return by_itself


def _wait(work: Check, process: CommandProcess | None, seconds: float) -> None:
    """Wait for the end of the check, and report progress."""
    began = shown = time.monotonic()
    while not work.over.wait(LOOK_SECONDS) and (now := time.monotonic()) < began + seconds:
        if process is not None and not process.is_alive():
            work.over.wait(1.0)  # its last messages may be on the way
            return
        if now > shown + _LINE_SECONDS:
            shown = now
            work.report(work.progress())


class AnyAgents(ModuleAssignment):
    """Lets random actions play all agents of the first simulator."""

    def cast(self, hello: pb.Hello) -> list[tuple[str, ...]]:
        if not self.table and (len(hello.agents) > 1 or any(each.policy for each in hello.agents)):
            self.table = {each.id: may_play(each.policy or RANDOM) for each in hello.agents}
        return super().cast(hello)


class Watched(ModulePlayer):
    """A player that acts at random, and checks its simulators."""

    ROW_STEPS = 32
    session: GatewaySession | None = None  # the first that has sent steps

    def __init__(self, name: str, interface: AgentInterface) -> None:
        super().__init__(interface, random_actor(*interface.spaces), self.ROW_STEPS, 0)
        self.ends, self.name = [0, 0], name  # numbers of terminated and truncated episodes
        leaves = interface.observations.leaves
        self._boxes = {each.path: each.space for each in leaves if isinstance(each.space, Box)}
        self._outside, self._many_outside = "", 0  # the first number outside, and number of rows
        self._first: dict[Path, NDArray[Any]] = {}  # [...] of the first row
        self._changed: dict[Path, NDArray[np.bool_]] = {}  # [...]

    def receive(self, shares: Sequence[PlayerRows], shown: Tree) -> None:
        super().receive(shares, shown)
        begin = 0
        for share in shares:
            self.session = self.session or share.steps.batch.session
            self.ends[0] += len(share.terminated)
            self.ends[1] += len(share.truncated)
            acting = np.delete(np.arange(len(share.slots)), share.paused)
            if len(acting):
                self._check_observations(take(shown, begin + acting), share, acting)
            begin += len(share.slots)

    def _check_observations(self, shown: Tree, share: PlayerRows, rows: NDArray[np.intp]) -> None:
        """Check the observations [R, ...] of some rows."""
        for path, array in flatten(shown):
            first = self._first.setdefault(path, array[0].copy())  # [...]
            changed = self._changed.setdefault(path, np.zeros(first.shape, np.bool_))
            self._changed[path] = changed | (array != first).any(0)
            if (box := self._boxes.get(path)) is None:
                continue
            # In the type of the numbers that came: a bound in float64 may round to another one.
            low, high = box.low.astype(array.dtype), box.high.astype(array.dtype)
            wrong = (array < low) | (array > high)  # [R, ...]
            self._many_outside += int(wrong.reshape(len(array), -1).any(1).sum())
            if wrong.any() and not self._outside:
                row, *rest = np.argwhere(wrong)[0].tolist()
                at = tuple(rest)
                number, ends = array[row][at], (low[at], high[at])
                steps = share.steps
                where = steps.agent.at(steps.environments[rows[row]])
                self._outside = (
                    f"{where}: the number{_at(path)} at {rest} is {number:g}, outside "
                    f"{ends[0]:g} to {ends[1]:g}"
                )

    def findings(self) -> Iterator[Finding]:
        """Yield findings about the agent's observations."""
        observed, acted = (" ".join(str(space).split())[:200] for space in self.interface.spaces)
        yield Finding(self.name, "ok", f"observes {observed}, acts in {acted}")
        if self._outside:
            text = f"{self._many_outside:,} are outside their space. {self._outside}"
            yield Finding("bounds", "problem", text, "scale them, or widen the space")
        for path, changed in self._changed.items():
            if not changed.all() and self.counts["steps"] >= _FEW_STEPS:
                same, first = int((~changed).sum()), np.argwhere(~changed)[0].tolist()
                text = f"{same} of {changed.size} numbers{_at(path)}, such as the one at {first}"
                yield Finding("observations", "warning", f"{self.name}: {text}, never changed")


def _at(path: Path) -> str:
    return f" of {path_name(path)!r}" if path else ""


class Check(StandaloneGateway):
    """Checks simulators by random play through a gateway."""

    def __init__(self, steps: int, report: Callable[[str], None]) -> None:
        super().__init__(report)
        self._wanted = steps
        self._players: list[Watched] = []
        # Times of the first steps, and of the last steps or hello, in seconds.
        self._began = self._last = 0.0
        self._looked_at = self._cut_at = 0.0  # times of the last turn and of the cut
        self._counts: dict[str, float] = defaultdict(float)
        self._before: dict[str, float] = self._counts  # counts before the cut
        self._afterwards, self._is_lost = "", False

    @property
    def was_cut(self) -> bool:
        """Whether the connection was cut."""
        return self._cut_at > 0

    @property
    def why(self) -> Mapping[str, str]:
        """The newest reasons why simulators came and went, by kind."""
        return self.server.manager.guests.why

    @property
    def _rule(self) -> str:
        """The broken rule; "": none was broken."""
        return self.why.get("refused") or self.why.get("failed", "")

    def progress(self) -> str:
        """Describe the progress of the check."""
        counts = self._counts
        return f"{counts['steps']:,.0f} steps, {counts['episodes']:,.0f} episodes"

    def prepare(self, key: str, agents: int, interface: AgentInterface) -> Watched:
        module, _, agent = key.partition(":")
        player = Watched(agent or module, interface)
        self._players.append(player)
        return player

    def after_turn(self) -> None:
        before, counts, now = self._counts, self.server.counts(), time.monotonic()
        if counts["steps"] > before["steps"]:
            self._began, self._last = self._began or now, now
        elif counts["sessions_begun"] > before["sessions_begun"]:
            self._last = now
        self._counts, self._looked_at = counts, now
        self.server.wake(LOOK_SECONDS)  # silence brings no turn
        connected, _ = self.server.manager.guests.here()
        self._is_lost = counts["sessions_lost"] > 0 or connected < counts["sessions"]
        left = "left" in self.why and not counts["sessions"]
        if self._rule or left or self._is_over(counts, now):
            self.over.set()

    def _is_over(self, counts: dict[str, float], now: float) -> bool:
        """Cut the connection after enough steps; return whether the check has ended."""
        if self.was_cut:
            # Resuming alone proves little: it also has to continue its steps.
            new = {name: counts[name] - self._before[name] for name in counts}
            if new.get("sessions_begun"):
                self._afterwards = "it began a new session: the episodes of the old one were cut"
            elif new.get("sessions_resumed") and new["steps"] >= _FEW_STEPS:
                self._afterwards = "resumed"
            return bool(self._afterwards) or now > self._cut_at + _RESUME_SECONDS
        # An episode of a game may last for minutes, so a few are waited for only a while.
        enough = counts["episodes"] >= _FEW or now > self._began + _FEW_SECONDS
        if counts["steps"] >= self._wanted and enough:
            session = next(each.session for each in self._players if each.session)
            if session.stream is not None:
                self.report(
                    "cuts the connection, to check whether the simulator resumes its session"
                )
                self._cut_at, self._before = now, counts
                session.stream.cut()
                return False
        return 0 < self._last < now - _SILENT_SECONDS

    def findings(self) -> Iterator[Finding]:
        """Yield all findings."""
        for player in self._players:
            yield from player.findings()
        if self._counts["steps"]:
            yield from self._steps()
            yield from self._episodes()
        elif not self._rule:
            began = f"a session began, and in {self._looked_at - self._last:.0f} s"
            text = began if self._players else "no simulator connected:"
            yield Finding("steps", "problem", f"{text} no step was taken")
        if self._rule:
            yield Finding("protocol", "problem", self._rule)
        elif self._counts["steps"]:
            yield Finding("protocol", "ok", "no rule was broken")
        # Only a connection that this check did not cut itself says something of the simulator.
        if self._is_lost and not self.was_cut:
            text = "it broke, and the simulator did not come back"
            advice = "send a Goodbye at the end, and no message above Welcome.message_bytes"
            yield Finding("connection", "problem", text, advice)
        elif self._afterwards == "resumed":
            yield Finding("cut connection", "ok", "the simulator resumed its session")
        elif self.was_cut:
            text = self._afterwards or "the simulator did not come back"
            advice = "send Hello.resume_token in a new stream within Welcome.resume_seconds"
            yield Finding("cut connection", "warning", text, advice)

    def _steps(self) -> Iterator[Finding]:
        steps, seconds = self._counts["steps"], max(self._last - self._began, 1e-3)
        text = f"{steps:,.0f} in {seconds:.1f} s, {steps / seconds:,.0f}/s"
        silent = self._looked_at - self._last
        if steps >= self._wanted or "left" in self.why or self._is_lost or self._rule:
            yield Finding("steps", "ok", text)
        else:
            text += f"; all were answered, but none came in the last {silent:.0f} s"
            yield Finding("steps", "problem" if silent > _END_SECONDS else "warning", text)

    def _episodes(self) -> Iterator[Finding]:
        played = self.server.manager.pop_played()
        of_agents = {player.name: player.pop_ended() for player in self._players}
        lengths = played.env_lengths or [each for _, ended in of_agents.values() for each in ended]
        if not lengths and (self._rule or self._is_lost):
            return  # it had no time to end one
        if not lengths:
            advice = "end them with terminated, or with truncated after a number of steps"
            yield Finding("episodes", "warning", "none ended", advice)
            return
        terminated, truncated = np.sum([player.ends for player in self._players], 0)
        share = 100 * terminated / (terminated + truncated)
        ends = f"{share:.0f} % terminated, {100 - share:.0f} % truncated"
        yield Finding("episodes", "ok", f"{len(lengths):,} of {_spread(lengths)} steps; {ends}")
        # Returns of 0 usually mean that the simulator does not send its rewards.
        for name, (returns, _) in of_agents.items():
            if returns:
                text, advice = f"{name}: {_spread(returns)}", "nothing is learned from rewards of 0"
                yield judged("returns", any(returns), text, advice)


def _spread(numbers: Sequence[float]) -> str:
    return f"{min(numbers):g} to {max(numbers):g}, mean {sum(numbers) / len(numbers):.4g}"


run = command("check-simulator", Arguments, _report)
