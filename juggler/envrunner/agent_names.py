"""Names of agents, and patterns that match them. No torch here."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

#: The most agents that a simulator may have in one environment.
MOST_AGENTS: Final = 64
#: The most characters of the name of a simulator's agent.
LONGEST_NAME: Final = 128


def matches(agent: str, pattern: str) -> bool:
    """Return whether a pattern (`*`, `?`, `[...]`) or name matches this agent."""
    # An agent's own name may have characters that mean something in a pattern, as in agent[0].
    return agent == pattern or fnmatchcase(agent, pattern)
