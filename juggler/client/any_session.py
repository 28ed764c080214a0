"""What the sessions of all modes have in common."""

from __future__ import annotations

from typing import Self

from juggler.client.connection import Connection
from juggler.client.spaces import Values


class AnySession:
    """A session with a gateway, as a context manager. If the connection breaks, the session
    continues over another one, provided that it is made within `welcome.resume_seconds`.

    Args:
        connection: the session's connection.
        observations: values of the simulator's observations.
        actions: values of its actions.
        environments: N; None: one environment, without a dimension for it.

    Attributes:
        welcome: the gateway's first message, a `Welcome` of simulator.proto.
    """

    def __init__(
        self,
        connection: Connection,
        observations: Values,
        actions: Values,
        environments: int | None,
    ) -> None:
        self._connection = connection
        self._observations, self._actions = observations, actions
        self._count = environments
        self._seq = 0
        self.welcome = connection.welcome

    def close(self) -> None:
        """Say goodbye. Running episodes end as truncated."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self.close()
