"""What an EnvRunner process is started with, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.runtime.actors.worker import Contact

ENVRUNNER = "envrunner"
EVALUATOR = "evaluator"


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where a gateway listens for simulators.

    Attributes:
        address: "host:port"; gateway i of a driver has port + i; port 0: any.
        insecure: whether to listen beyond loopback even without TLS or a token.
        logs: the directory for what simulators print that it starts; "": it goes where the output
            of the EnvRunner goes.
    """

    address: str
    insecure: bool = False
    logs: str = ""


@dataclass(frozen=True, slots=True)
class EnvRunnerProgram:
    """What an EnvRunner process is started with.

    Attributes:
        contact: how it finds its driver.
        role: "envrunner", or "evaluator" for one that only plays whole episodes.
        own_code: cloudpickled (environment factory or None, module factory or None, connector
            classes by the names that stand for them): of a notebook or script. Only from a parent
            process through its own pipe, never from the network.
        gateway: where it listens for simulators; None: it has environments of its own.
    """

    contact: Contact
    role: str = ENVRUNNER
    own_code: bytes = b""
    gateway: GatewayAddress | None = None
