"""gRPC's reflection: lets tools such as grpcurl list what a server has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from juggler.runtime.actors.endpoints import EndpointError


def add_reflection(server: Any, services: Sequence[str]) -> None:
    """
    Args:
        server: that has not started yet.
        services: their full names.

    Raises:
        EndpointError: the library is not installed.
    """
    try:
        from grpc_reflection.v1alpha import reflection
    except ImportError:
        raise EndpointError(
            "--reflection needs a library that is not there: pip install 'juggler[reflection]'"
        ) from None
    reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], server)
