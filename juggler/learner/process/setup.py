"""What a learner process and its modules are set up with. No torch here: the driver writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from juggler.runtime.modules.config import ModuleConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSetup:
    """A learner process, whatever modules it hosts.

    Attributes:
        device: where it computes, as `parse_devices` names it.
        updates_in_flight: updates of a module that may be asked for and not answered.
        may_meet: its modules may be trained together with other learners.
        outlives_failures: a command or a batch that fails is answered as failed, and the process
            goes on for its other modules. Otherwise the process ends with the first failure.
    """

    device: str
    updates_in_flight: int
    may_meet: bool
    outlives_failures: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSetup:
    """A module, and how it is trained.

    Attributes:
        learner: the fields of the algorithm's config by name.
        module: what the module is built from.
        connectors: the table `connectors` of a configuration.
    """

    learner: dict[str, Any]
    module: ModuleConfig
    connectors: dict[str, Any]
