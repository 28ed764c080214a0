"""Where a driver takes workers of other hosts."""

from __future__ import annotations

from dataclasses import dataclass, field

from juggler.runtime.actors.tls import Tls


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a driver takes workers of other hosts.

    Attributes:
        address: "host:port".
        insecure: beyond loopback even without TLS or without a token.
        token: that every worker has to show; empty admits all.
        tls: of this host; None: connections are plain.
    """

    address: str
    insecure: bool = False
    token: str = field(default="", repr=False)
    tls: Tls | None = None
