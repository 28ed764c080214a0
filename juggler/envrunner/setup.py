"""What an EnvRunner is set up with, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from juggler.envrunner.config import EnvRunnerConfig
from juggler.runtime.modules.config import ModuleConfig

#: The module that draws every action at random. It has no weights, and plays any agent.
RANDOM: Final = "random"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActingSetup:
    """What an EnvRunner knows of one module that it acts with.

    Attributes:
        module: what the module is built from.
        connectors: the table `connectors` of a configuration.
        algorithm: the name of the algorithm that learns from its steps, for people.
        off_policy: that algorithm can learn from what another policy did.
        row_age: the most updates by which the weights of a row's first step may be older than the
            newest ones, where rows fill at a pace of their own.
        exploration_exponents: by which powers of the learner's number the module explores: one for
            each environment, or for all of them; (): it is as it comes.
        digest: of what a module plays with that is not trained, and which came before this setup;
            "": it is trained, and its weights come from learners.
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
        modules: what it acts with, by module id.
        agents: by agent, the module that plays it, or a list of the modules that may play it; {}:
            the environments have one agent, which the only module plays.
        mapping: the name of the function that chooses among those in each episode; "": they are
            drawn uniformly.
        league: requests bring the line-ups of episodes, and modules that are not trained come and
            go.
    """

    env_runner: EnvRunnerConfig
    modules: dict[str, ActingSetup]
    agents: dict[str, str | list[str]] = field(default_factory=dict)
    mapping: str = ""
    league: bool = False

    @property
    def critics_see(self) -> tuple[str, ...]:
        """What trained value functions see beyond their agents' observations.

        Values of `critic_sees`, without "observation".
        """
        trained = (acting for acting in self.modules.values() if not acting.digest)
        seen = {acting.module.critic_sees for acting in trained}
        return tuple(sorted(seen - {"observation"}))


def may_play(said: str | Sequence[str]) -> tuple[str, ...]:
    """The modules that may play an agent, from the table `agents`."""
    return (said,) if isinstance(said, str) else tuple(said)
