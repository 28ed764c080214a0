"""What an EnvRunner is set up with. No torch here: the driver writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from juggler.envrunner.config import EnvRunnerConfig
from juggler.runtime.modules.config import ModuleConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ActingSetup:
    """What an EnvRunner is told of one module that it acts with.

    Attributes:
        module: what the module is built from.
        connectors: the table `connectors` of a configuration.
        algorithm: the name of the algorithm that learns from its steps, for people.
        off_policy: that algorithm can learn from what another policy did.
        row_age: the most updates by which the weights of a row's first step may be older than the
            newest ones, where rows fill at a pace of their own.
    """

    module: ModuleConfig
    connectors: dict[str, Any]
    algorithm: str
    off_policy: bool
    row_age: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvRunnerSetup:
    """What the driver tells an EnvRunner, a gateway or an evaluator before anything else.

    Attributes:
        env_runner: its environments, and how it steps them.
        modules: what it acts with, by module id.
        agents: by agent, the module that plays it; {}: the environments have one agent, which the
            only module plays.
    """

    env_runner: EnvRunnerConfig
    modules: dict[str, ActingSetup]
    agents: dict[str, str] = field(default_factory=dict)

    @property
    def critics_see(self) -> tuple[str, ...]:
        """What value functions of the modules see beside the observations of their own agents:
        values of `critic_sees`, without "observation"."""
        seen = {acting.module.critic_sees for acting in self.modules.values()}
        return tuple(sorted(seen - {"observation"}))
