"""gRPC reflection, which lets tools such as grpcurl list the services of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.strangers import Strangers
from juggler.runtime.installing import installing

_MOST_ASKING = 16  # calls at once, without a token


def add_reflection(server: Any, services: Sequence[str]) -> None:
    """Add reflection to a server.

    Args:
        server: a server that has not started yet.
        services: their full names.

    Raises:
        EndpointError: the library is not installed.
    """
    try:
        from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
    except ImportError:
        raise EndpointError(
            f"--reflection needs a library that is not there: {installing('reflection')}"
        ) from None
    names = [*services, reflection.SERVICE_NAME]
    of_asyncio = isinstance(server, grpc.aio.Server)
    servicer: Any = (reflection.aio if of_asyncio else reflection).ReflectionServicer(names)
    answers, strangers = servicer.ServerReflectionInfo, Strangers(_MOST_ASKING)

    def bounded(requests: Any, context: Any) -> Any:
        with strangers.visit(context.cancel):
            yield from answers(requests, context)

    async def bounded_of_asyncio(requests: Any, context: Any) -> Any:
        call: Any = asyncio.current_task()
        try:
            with strangers.visit(call.cancel):
                async for answer in answers(requests, context):
                    yield answer
        except asyncio.CancelledError:  # gRPC would report it to nobody
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)

    servicer.ServerReflectionInfo = bounded_of_asyncio if of_asyncio else bounded
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
