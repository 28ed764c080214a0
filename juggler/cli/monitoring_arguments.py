"""Options for monitoring a run, of the commands that start a driver."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.cli.arguments import Flag
from juggler.driver.monitoring import MonitoringOptions
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.tls import Tls


@dataclass(kw_only=True)
class MonitoringArguments:
    """How a run can be monitored, besides `juggler status`."""

    metrics_bind: str = ""
    """Serve metrics for Prometheus at this address, HOST:PORT, as /metrics: with the driver's TLS
    and token, if it has any, and with neither if --insecure is given. `juggler train` takes the
    token from JUGGLER_TOKEN or JUGGLER_TOKEN_FILE."""

    health_bind: str = ""
    """Also serve health checks at this address, HOST:PORT, without TLS: for probes that cannot use
    it."""

    reflection: Flag = False
    """Let tools such as grpcurl list the services of the driver."""

    def monitoring(
        self, insecure: bool, token: str | None = None, tls: Tls | None = None
    ) -> MonitoringOptions:
        """Make the driver's options from the run's token and TLS files.

        Args:
            insecure: serve metrics without token and TLS.
            token: the run's token. None: the run serves this host only, and metrics use the token
                from the environment variables.
            tls: the run's TLS files.

        Raises:
            ValueError: the token in the environment variables is not valid.
        """
        if insecure:  # for scrapers that can only be given an address
            token, tls = "", None
        elif token is None:
            token = read_token(None) if self.metrics_bind else ""
        services = self.metrics_bind, self.health_bind, self.reflection
        return MonitoringOptions(*services, insecure, token, tls)
