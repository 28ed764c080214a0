"""How many sessions a gateway takes, and of what size."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.gateway.sessions import Code, Session, SessionError
from juggler.runtime.wire.v1 import simulator_pb2 as pb

MOST_SESSIONS = 4096
MOST_ENVIRONMENTS = 1 << 16  # once for each agent
#: Numbers that all sessions together may tell of one step. Each takes 160 bytes, so all 42 MB.
MOST_NUMBERS = 1 << 18


@dataclass(frozen=True, slots=True)
class Load:
    """What sessions take of a gateway's room.

    Attributes:
        sessions: how many they are.
        environments: that they have, once for each agent.
        numbers: that they tell of a step of all of these.
    """

    sessions: int = 0
    environments: int = 0
    numbers: int = 0

    @classmethod
    def of(cls, one: Session | pb.Hello) -> Load:
        """Of a session, or of the one that begins with this message."""
        environments = one.environments * len(one.agents)
        return cls(1, environments, environments * len(one.info_names))

    def __add__(self, other: Load) -> Load:
        return Load(
            self.sessions + other.sessions,
            self.environments + other.environments,
            self.numbers + other.numbers,
        )

    def __sub__(self, other: Load) -> Load:
        return self + Load(-other.sessions, -other.environments, -other.numbers)


def no_room(more: Load, here: Load) -> SessionError | None:
    """What ends a new session that has no room; None: there is room for it.

    Args:
        more: of the new one.
        here: of those that are here.
    """
    both = here + more
    if more.environments > MOST_ENVIRONMENTS:
        text = (
            f"{more.environments} environments in one session, once for each agent: have at most "
            f"{MOST_ENVIRONMENTS}"
        )
        return SessionError(Code.FULL, text)
    if both.sessions > MOST_SESSIONS or both.environments > MOST_ENVIRONMENTS:
        text = (
            f"{here.sessions} sessions with {here.environments} environments are here, and at most "
            f"{MOST_SESSIONS} with {MOST_ENVIRONMENTS}, once for each agent, may be: start another "
            "gateway"
        )
    elif more.numbers and both.numbers > MOST_NUMBERS:
        text = (
            f"its info_names are {more.numbers} numbers for each step of all environments and "
            f"agents, {here.numbers} of other sessions are here, and at most {MOST_NUMBERS} may "
            "be: name fewer, or start another gateway"
        )
    else:
        return None
    return SessionError(Code.FULL, text, retryable=True)
