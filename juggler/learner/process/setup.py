"""Settings of a learner process and its modules. No torch, because the driver makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gymnasium import Space

from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.v1 import training_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSetup:
    """Settings of a learner process, for all modules that it hosts.

    Attributes:
        device: where it computes, as named by `parse_devices`.
        threads: in which it computes on a CPU.
        updates_in_flight: the most unanswered updates of a module.
        may_meet: whether its modules may be trained together with other learners.
        shared: by pattern of names of parameters, the modules that share what it matches.
        synchronous: whether modules that share parts are published together, once each of them has
            been asked for an update. Else each is published behind its own.
        outlives_failures: whether the process answers a failed command as failed, refuses an
            invalid batch, and goes on for its other modules. Otherwise it ends.
    """

    device: str
    updates_in_flight: int
    may_meet: bool
    threads: int = 1
    shared: dict[str, list[str]] = field(default_factory=dict)
    synchronous: bool = False
    outlives_failures: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSetup:
    """Settings of a module and its training.

    Attributes:
        learner: the fields of the algorithm's config, by name.
        module: the module's configuration.
        connectors: the table `connectors` of a configuration.
    """

    learner: dict[str, Any]
    module: ModuleConfig
    connectors: dict[str, Any]


def critic_space_of(command: training_pb2.AddModule) -> Space[Any] | None:
    """The space of what a module's value function sees beside observations; None: nothing."""
    return space_from_message(command.critic_space) if command.HasField("critic_space") else None
