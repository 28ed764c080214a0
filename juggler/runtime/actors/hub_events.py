"""What a hub tells of its workers."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import any_pb2

from juggler.runtime.wire.v1 import attach_pb2


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """One process's time as a worker. Two are the same only if they are the same object."""

    worker_id: str  # role and index; a replacement gets the same
    incarnation: str
    role: str
    index: int
    host: str
    pid: int
    devices: tuple[str, ...]
    data_addresses: tuple[str, ...]
    local: bool


@dataclass(frozen=True, slots=True)
class Joined:
    worker: Worker


@dataclass(frozen=True, slots=True)
class Left:
    """The worker's stream is over.

    `farewell` where it said so itself: then its process ends by itself too, and of the commands
    that have no answer it has begun those in `unanswered` and no other. `stack` where its main
    loop hung; `unheard` where its heart did not beat either.
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
