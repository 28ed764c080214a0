"""Version 1 of the simulators' protocol keeps what docs/external-simulators.md promises."""

from __future__ import annotations

from pathlib import Path

from juggler.gateway.session_manager import PROTOCOL_MAX, PROTOCOL_MIN
from juggler.runtime.wire.v1 import simulator_pb2, spaces_pb2, tensors_pb2

PROMISED = Path(__file__).with_name("simulator_protocol_1.txt")


def numbered() -> set[str]:
    """Fields and enumeration words, with their numbers and types."""
    found = set()
    for file in (simulator_pb2, spaces_pb2, tensors_pb2):
        waiting = [*file.DESCRIPTOR.message_types_by_name.values()]
        words = [*file.DESCRIPTOR.enum_types_by_name.values()]
        while waiting:
            message = waiting.pop()
            waiting += message.nested_types
            words += message.enum_types
            for field in message.fields:
                many = "repeated " if field.is_repeated else ""
                found.add(f"{message.full_name}.{field.name} = {field.number}, {many}{field.type}")
        for enum in words:
            found |= {f"{enum.full_name}.{each.name} = {each.number}" for each in enum.values}
    return found


def test_nothing_of_version_1_is_removed_or_changed() -> None:
    """A new field is added to the file, too."""
    assert PROTOCOL_MIN == PROTOCOL_MAX == 1
    assert numbered() == {*PROMISED.read_text().splitlines()}
