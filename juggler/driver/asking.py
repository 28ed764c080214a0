"""Asks a driver how its run is doing, from another process."""

from __future__ import annotations

from typing import Any

import grpc

from juggler.driver.monitoring import STATUS_METHOD
from juggler.runtime.actors.credentials import bearer
from juggler.runtime.wire.v1 import status_pb2


def ask_status(channel: grpc.Channel, seconds: float, token: str = "") -> status_pb2.RunStatus:
    """A run's status.

    Args:
        channel: to its driver.
        seconds: to wait for an answer.
        token: of the run; "": none, as on the driver's Unix socket.

    Raises:
        grpc.RpcError: there is no answer.
    """
    ask: Any = channel.unary_unary(
        STATUS_METHOD,
        request_serializer=status_pb2.StatusRequest.SerializeToString,
        response_deserializer=status_pb2.RunStatus.FromString,
    )
    answer: status_pb2.RunStatus = ask(
        status_pb2.StatusRequest(), timeout=seconds, metadata=bearer(token)
    )
    return answer


def to_plain(message: Any) -> dict[str, Any]:
    """A message as plain JSON data, by the names of its fields, with whole numbers as such."""
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            plain[field.name] = None
        elif field.message_type is None:
            plain[field.name] = list(value) if field.is_repeated else value
        elif field.message_type.GetOptions().map_entry:
            plain[field.name] = dict(value)
        elif field.is_repeated:
            plain[field.name] = [to_plain(each) for each in value]
        else:
            plain[field.name] = to_plain(value)
    return plain
