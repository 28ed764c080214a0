"""Logs which simulators connect, leave and are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from juggler.gateway.agents import module_of
from juggler.gateway.sessions import GatewaySession, Sessions
from juggler.runtime.actors.hub import one_line

#: Within this time, further lines of one kind are only counted.
_SECONDS = 60.0
_MOST_LINES = {"refused": 1}  # in this time, by kind
_MOST = 10  # lines of other kinds
_LONGEST = 400  # characters of a reason
_SHOWN = 4  # names in a line


@dataclass(slots=True)
class _Lines:
    """Counts the lines of one kind since a time in seconds."""

    began: float
    reported: int = 1
    omitted: int = 0
    last: str = ""  # newest omitted line


class ConnectionLog:
    """Logs simulators that connect and leave, in few lines.

    Args:
        sessions: the open sessions.
        report_line: reports a line, as `GatewayWork.report_line` does.
        rows: maximum number of environments that fit a batch; 0: no maximum.
        clock: returns seconds.
    """

    def __init__(
        self,
        sessions: Sessions,
        report_line: Callable[[str, bool, int, int], None],
        rows: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions, self._report_line, self._rows, self._clock = (
            sessions,
            report_line,
            rows,
            clock,
        )
        self._of: dict[str, _Lines] = {}  # by kind of line
        self._warned_of_rows = False

    def connected(self, session: GatewaySession, *, back: bool) -> None:
        """Log a simulator that began a session, or is `back` in it."""
        modules = dict.fromkeys(module_of(each) for agent in session.agents for each in agent.seats)
        plural = "" if session.environments == 1 else "s"
        what = f"{session.environments:,} environment{plural} for {_few('policy', modules)}"
        if names := [agent.name for agent in session.agents if agent.name]:
            what += f", {_few('agent', names)}"
        self._line(
            "came", f"{'has again' if back else 'has'} the simulator at {session.peer}", what
        )
        # Rows beyond one batch wait for the next one, and may become too old.
        _, environments = self.here()
        if 0 < self._rows < environments and not self._warned_of_rows:
            self._warned_of_rows = True
            self._report(
                f"has simulators with {environments:,} environments, and a batch has "
                f"envs_per_runner = {self._rows:,} rows for each agent: the others wait meanwhile, "
                "or become too old. Let envs_per_runner be the number of all environments",
                True,
            )

    def vanished(self, session: GatewaySession) -> None:
        """Log a broken connection of a simulator."""
        waits = f"waits {self._sessions.resume_seconds:.0f} s for it"
        self._line("vanished", f"lost the connection of the simulator at {session.peer}", waits)

    def left(self, session: GatewaySession, why: str) -> None:
        """Log the end of a session."""
        self._line("left", f"no longer has the simulator at {session.peer}", why)

    def refused(self, peer: str, why: str) -> None:
        """Log a refused simulator."""
        self._line("refused", f"refused a simulator at {address_of(peer)}", why)

    def report_omitted(self) -> None:
        """Report the number of omitted lines, if it is time."""
        now = self._clock()
        for kind, lines in list(self._of.items()):
            if now - lines.began < _SECONDS:
                continue
            del self._of[kind]
            if lines.omitted:
                self._of[kind] = _Lines(now)
                more = (
                    f" ({lines.omitted:,} times in the last {_SECONDS:.0f} s; this is the last one)"
                )
                self._report(lines.last + (more if lines.omitted > 1 else ""), kind == "refused")

    def _line(self, kind: str, what: str, why: str) -> None:
        self.report_omitted()
        text = f"{what}: {one_line(why, _LONGEST)}"
        lines = self._of.setdefault(kind, _Lines(self._clock(), reported=0))
        if lines.reported < _MOST_LINES.get(kind, _MOST):
            lines.reported += 1
            self._report(text, kind == "refused")
        else:
            lines.omitted, lines.last = lines.omitted + 1, text

    def _report(self, text: str, warning: bool) -> None:
        simulators, environments = self.here()
        self._report_line(text, warning, simulators, environments)

    def here(self) -> tuple[int, int]:
        """Return the number of connected simulators and of their environments."""
        here = [each for each in self._sessions.by_id.values() if each.stream is not None]
        return len(here), sum(each.environments for each in here)


def address_of(peer: str) -> str:
    """Return the address of a stream's other end, for messages."""
    kind, _, address = peer.partition(":")
    unknown = (
        "a Unix socket" if kind == "unix" else "an unknown address"
    )  # gRPC leaves its path out
    return unquote(address) or unknown


def _few(what: str, names: Iterable[str]) -> str:
    all_names = list(names)
    shown = ", ".join(repr(name[:64]) for name in all_names[:_SHOWN])
    more = len(all_names) - _SHOWN
    plural = what if len(all_names) == 1 else {"policy": "policies"}.get(what, f"{what}s")
    return f"{plural} {shown}{f' and {more} more' if more > 0 else ''}"
