"""How a learner process is started. No torch, because the driver imports this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.runtime.actors.worker import Contact

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
        ValueError: a learner cannot have so many.
    """
    if not 0 <= count <= _MOST_RECEIVERS:
        raise ValueError(f"--receivers {count}: must be from 0 to {_MOST_RECEIVERS}")
