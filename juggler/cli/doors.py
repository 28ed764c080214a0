"""Options of those commands that drive a run: how others can watch it."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.driver.watching import Doors


@dataclass(kw_only=True)
class DoorArguments:
    """Through what a run can be watched, beside `juggler status`."""

    metrics_bind: str = ""
    """Serve metrics for Prometheus there, HOST:PORT, as /metrics."""

    health_bind: str = ""
    """Serve health there too, HOST:PORT, without TLS: for probes that know none."""

    reflection: bool = False
    """Let tools such as grpcurl list what the driver's server has."""

    def doors(self, insecure: bool) -> Doors:
        return Doors(self.metrics_bind, self.health_bind, self.reflection, insecure)
