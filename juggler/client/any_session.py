"""What sessions of every mode have."""

from __future__ import annotations

from typing import Self

from juggler.client.connection import Connection
from juggler.client.spaces import Values


class AnySession:
    """A session with a gateway; a context. Where the connection breaks, it goes on over another
    one, if there is one within `welcome.resume_seconds`.

    Args:
        connection: of the session.
        observations: of the simulator.
        actions: of the simulator.
        environments: N; None: one, without a dimension for it.

    Attributes:
        welcome: what the gateway said at the beginning, a `Welcome` of simulator.proto.
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
        """Say goodbye. Episodes that are running end as truncated."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self.close()
