"""What a Learner process is started with. No torch here: the driver starts such processes."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.runtime.actors.worker import Contact

LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class LearnerProgram:
    """What a Learner process is started with.

    Attributes:
        contact: how it finds its driver.
        bind: where it listens for EnvRunners of other hosts, "host:port"; "" where there are none.
        advertise: how they should dial it; "" means as bound.
        insecure: listen beyond loopback though something is not encrypted or not authenticated.
        reflection: tools may list what its server has.
        own_code: cloudpickled (environment factory or None, module factory or None, connector
            classes by name), as the EnvRunners get them.
    """

    contact: Contact
    bind: str = ""
    advertise: str = ""
    insecure: bool = False
    reflection: bool = False
    own_code: bytes = b""
