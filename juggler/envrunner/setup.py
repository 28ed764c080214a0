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
    """Setup of one module that an EnvRunner acts with.

    Attributes:
        algorithm: the name of the algorithm that learns from its steps, for messages.
        off_policy: the algorithm can learn from another policy's steps.
        row_age: maximum number of updates that the weights of a row's first step may be behind the
            newest weights, if rows fill at their own pace.
        exploration_exponents: powers of the learner's exploration that the module explores with:
            one for each environment, or one for all; (): exploration is used as it is.
        digest: of the weights of a module that is not trained, sent before this setup; "": it is
            trained, and its weights come from learners.
    """

    module: ModuleConfig
    connectors: dict[str, Any]
    algorithm: str
    off_policy: bool
    row_age: int
    exploration_exponents: tuple[float, ...] = ()
    digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvRunnerSetup:
    """The driver's first message to EnvRunners, gateways and evaluators.

    Attributes:
        env_runner: its environments, and how it steps them.
        modules: that it acts with, by module id.
        agents: by agent, the module that plays it, or a list of the modules that may play it; {}:
            the environments have one agent, which the only module plays.
        mapping: the name of the function that chooses among these modules in each episode; "":
            they are drawn uniformly.
        league: requests bring the line-ups of episodes, and players are added and removed.
        evaluates: the run has evaluations.
    """

    env_runner: EnvRunnerConfig
    modules: dict[str, ActingSetup]
    agents: dict[str, str | list[str]] = field(default_factory=dict)
    mapping: str = ""
    league: bool = False
    evaluates: bool = False

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
