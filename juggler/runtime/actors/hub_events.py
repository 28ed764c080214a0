"""The events that a hub reports about its workers."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import any_pb2

from juggler.runtime.wire.v1 import attach_pb2


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One incarnation of a worker. Two are equal only if they are the same object."""

    worker_id: str  # role and index; a replacement has the same
    incarnation: str
    role: str
    index: int
    host: str
    pid: int
    devices: tuple[str, ...]
    data_addresses: tuple[str, ...]
    local: bool
    episode_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    worker: Worker


@dataclass(frozen=True, slots=True)
class Left:
    """The worker's stream is over.

    `farewell`: the worker said so itself. Then its process ends by itself, and of the commands
    without an answer it has begun exactly those in `unanswered`. `stack`: where its main loop hung.
    `unheard`: its heartbeats were missing too.
    """

    worker: Worker
    reason: str
    failure: attach_pb2.Failure | None = None
    farewell: bool = False
    unanswered: frozenset[int] = frozenset()
    stack: str = ""
    unheard: bool = False


@dataclass(frozen=True, slots=True)
class Replied:
    worker: Worker
    reply: attach_pb2.Reply


@dataclass(frozen=True, slots=True)
class Reported:
    worker: Worker
    body: any_pb2.Any


HubEvent = Joined | Left | Replied | Reported
