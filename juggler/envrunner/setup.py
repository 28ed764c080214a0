"""What an EnvRunner is set up with. No torch here: the driver writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from juggler.envrunner.config import EnvRunnerConfig
from juggler.runtime.modules.config import ModuleConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvRunnerSetup:
    """What the driver tells an EnvRunner, a gateway or an evaluator before anything else.

    Attributes:
        env_runner: its environments, and how it steps them.
        module_id: of the module that it acts with.
        module: what that module is built from.
        connectors: the table `connectors` of a configuration.
        algorithm: what learns from its steps, for people.
        off_policy: that algorithm can learn from what another policy did.
        row_age: updates that the weights of a gateway's row may be old when the row is full.
    """

    env_runner: EnvRunnerConfig
    module_id: str
    module: ModuleConfig
    connectors: dict[str, Any]
    algorithm: str
    off_policy: bool
    row_age: int
