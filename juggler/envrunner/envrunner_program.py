"""Arguments of an EnvRunner process. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.runtime.actors.attachment import Contact

ENVRUNNER = "envrunner"
EVALUATOR = "evaluator"


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The address at which a gateway listens for simulators."""

    address: str  # "host:port"; gateway i of a driver has port + i; port 0: any
    insecure: bool = False  # whether to listen beyond loopback even without TLS or a token
    # The directory for the output of simulators that it starts; "": together with the output of the
    # EnvRunner.
    logs: str = ""


@dataclass(frozen=True, slots=True)
class EnvRunnerProgram:
    """Arguments of an EnvRunner process."""

    contact: Contact  # address and credentials of its driver
    role: str = ENVRUNNER  # "envrunner", or "evaluator" if it only plays whole episodes
    # Cloudpickled (environment factory or None, module factory or None, connector classes by name):
    # of a notebook or script. Only from a parent process through its own pipe, never from the
    # network.
    own_code: bytes = b""
    # The address for simulators; None: it has its own environments.
    gateway: GatewayAddress | None = None
