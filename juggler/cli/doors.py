"""Options of those commands that drive a run: how others can watch it."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.cli.arguments import Flag
from juggler.driver.watching import Doors
from juggler.runtime.actors.tls import Tls


@dataclass(kw_only=True)
class DoorArguments:
    """Through what a run can be watched, beside `juggler status`."""

    metrics_bind: str = ""
    """Serve metrics for Prometheus there, HOST:PORT, as /metrics: with the TLS and the token that
    the driver has, if any; with --insecure without."""

    health_bind: str = ""
    """Serve health there too, HOST:PORT, without TLS: for probes that know none."""

    reflection: Flag = False
    """Let tools such as grpcurl list what the driver's server has."""

    def doors(self, insecure: bool, token: str = "", tls: Tls | None = None) -> Doors:
        """`token` and `tls` are those of workers."""
        if insecure:  # a scraper may know an address and nothing else
            token, tls = "", None
        doors = self.metrics_bind, self.health_bind, self.reflection
        return Doors(*doors, insecure, token, tls)
