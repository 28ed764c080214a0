"""Setups of EnvRunners, which the driver sends. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

from juggler.envrunner.config import EnvRunnerConfig
from juggler.runtime.modules.config import ModuleConfig

#: The module that draws every action at random. It has no weights, and plays any agent.
RANDOM: Final = "random"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActingSetup:
    """Setup of one module that an EnvRunner acts with."""

    module: ModuleConfig
    connectors: dict[str, Any]
    algorithm: str  # the name of the algorithm that learns from its steps, for messages
    off_policy: bool  # the algorithm can learn from another policy's steps
    # Maximum number of updates that the weights of a row's first step may be behind the newest
    # weights, if rows fill at their own pace.
    row_age: int
    # Powers of the learner's exploration that the module explores with: one for each environment,
    # or one for all; (): exploration is used as it is.
    exploration_exponents: tuple[float, ...] = ()
    # Of the weights of a module that is not trained, sent before this setup; "": it is trained, and
    # its weights come from learners.
    digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvRunnerSetup:
    """The driver's first message to EnvRunners, gateways and evaluators."""

    env_runner: EnvRunnerConfig  # its environments, and how it steps them
    modules: dict[str, ActingSetup]  # that it acts with, by module id
    # By agent, the module that plays it, or a list of the modules that may play it; {}: the
    # environments have one agent, which the only module plays.
    agents: dict[str, str | list[str]] = field(default_factory=dict)
    # The name of the function that chooses among these modules in each episode; "": they are drawn
    # uniformly.
    mapping: str = ""
    # Requests bring the line-ups of episodes, and players are added and removed.
    league: bool = False
    evaluates: bool = False  # the run has evaluations

    @property
    def critics_see(self) -> tuple[str, ...]:
        """Values of `critic_sees` of trained modules, without "observation"."""
        trained = (acting for acting in self.modules.values() if not acting.digest)
        seen = {acting.module.critic_sees for acting in trained}
        return tuple(sorted(seen - {"observation"}))


def matches(agent: str, pattern: str) -> bool:
    """Return whether a pattern (`*`, `?`, `[...]`) or name matches this agent."""
    # An agent's own name may have characters that mean something in a pattern, as in agent[0].
    return agent == pattern or fnmatchcase(agent, pattern)


def may_play(ids: str | Sequence[str]) -> tuple[str, ...]:
    """Return the modules that may play an agent, from the table `agents`."""
    return (ids,) if isinstance(ids, str) else tuple(ids)
