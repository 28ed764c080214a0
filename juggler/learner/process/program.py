"""How a learner process is started and set up. No torch: the driver imports this too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gymnasium import Space

from juggler.runtime.actors.worker import Contact
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.v1 import training_pb2

LEARNER = "learner"
_MOST_RECEIVERS = 16  # which is more than a learner could read the batches of


@dataclass(frozen=True, slots=True)
class LearnerProgram:
    """All that a learner process is started with.

    Attributes:
        contact: how it finds its driver.
        bind: "host:port" to listen on for EnvRunners of other hosts; "": there are none.
        advertise: the address that they should dial; "": the bound one.
        insecure: whether to listen beyond loopback without encryption or authentication.
        reflection: whether tools may list the services of its server.
        receivers: how many processes receive batches for it, from EnvRunners of other hosts.
        own_code: cloudpickled (environment factory or None, module factory or None, connector
            classes by name), as the EnvRunners get them.
    """

    contact: Contact
    bind: str = ""
    advertise: str = ""
    insecure: bool = False
    reflection: bool = False
    receivers: int = 0
    own_code: bytes = b""


def must_allow_receivers(count: int) -> None:
    """
    Raises:
        ValueError: there are too many for a learner.
    """
    if not 0 <= count <= _MOST_RECEIVERS:
        raise ValueError(f"--receivers {count}: must be from 0 to {_MOST_RECEIVERS}")


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
            invalid batch, and continues for its other modules. Otherwise it ends.
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
    """The space of what only a module's value function sees; None: there is none."""
    return space_from_message(command.critic_space) if command.HasField("critic_space") else None
