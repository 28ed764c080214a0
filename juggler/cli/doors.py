"""Options of the commands that drive a run: how it can be watched."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.cli.arguments import Flag
from juggler.driver.watching import Doors
from juggler.runtime.actors.tls import Tls


@dataclass(kw_only=True)
class DoorArguments:
    """How a run can be watched, besides `juggler status`."""

    metrics_bind: str = ""
    """Serve metrics for Prometheus at this address, HOST:PORT, as /metrics: with the driver's TLS
    and token, if it has any, and with neither if --insecure is given."""

    health_bind: str = ""
    """Also serve health checks at this address, HOST:PORT, without TLS: for probes that cannot use
    it."""

    reflection: Flag = False
    """Let tools such as grpcurl list the services of the driver."""

    def doors(self, insecure: bool, token: str = "", tls: Tls | None = None) -> Doors:
        """`token` and `tls` are those that workers show."""
        if insecure:  # for scrapers that can only be given an address
            token, tls = "", None
        doors = self.metrics_bind, self.health_bind, self.reflection
        return Doors(*doors, insecure, token, tls)
