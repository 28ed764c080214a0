"""State sync: all learners of a group take the state of the one with the most updates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import xxhash

from juggler.learner.group.peers import Peers
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import training_pb2


class HasState(Protocol):
    """The part of a learner that state sync needs."""

    updates: int

    def save(self) -> tuple[dict[str, Tree], dict[str, Any]]: ...

    def restore(self, tree: Tree, extras: Mapping[str, Any]) -> None: ...


def take_over_newest(learner: HasState, peers: Peers) -> None:
    """Take over the state of the learner with the most updates; of several, that of lowest rank.

    If an update succeeded at only some learners, all continue from theirs. A state with a large
    replay takes long to save, to hash and to restore: nobody is taken for lost meanwhile.

    Raises:
        PeerLost: a learner is gone.
    """
    own_hash = peers.wait_for_all(lambda: state_hash(learner))
    states = peers.gather([learner.updates, own_hash])
    leader = max(range(peers.size), key=lambda rank: (states[rank][0], -rank))
    if all(state == states[leader] for state in states):
        return
    leads = peers.rank == leader
    # One chunk at a time: a replay is large.
    size, chunks = peers.wait_for_all(lambda: _chunks(learner) if leads else (0, iter(())))
    limits = Limits(payload_bytes=peers.gather([size])[leader][0])
    reader = FrameReader(training_pb2.StateHeader, limits, digests=True)
    behind = states[peers.rank] != states[leader]
    frame = None
    while True:
        own = next(chunks, None)
        chunk_size = peers.gather([len(own or b"")])[leader][0]
        if not chunk_size:
            break
        chunk = peers.broadcast(own, leader, chunk_size)
        frame = reader.feed(chunk) if behind else None
        peers.progresses()

    def restore() -> None:
        if frame is not None:
            learner.restore(frame.tree, json.loads(frame.header.extra))

    peers.wait_for_all(restore)


def state_hash(learner: HasState) -> int:
    """The signed 64-bit XXH3 of all that updates change, including the connectors' estimates."""
    digest = xxhash.xxh3_64()
    tree, _ = learner.save()
    for path, array in flatten(tree):
        digest.update(repr((path, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.intdigest() - 2**63


def _chunks(learner: HasState) -> tuple[int, Iterator[bytes]]:
    """The most bytes that a state's arrays take in a frame, and the chunks of the frame."""
    tree, extra = learner.save()
    header = training_pb2.StateHeader(extra=json.dumps(extra))
    # They are aligned in the payload, so it is somewhat larger than their sum.
    size = sum(array.nbytes + 64 for _, array in flatten(tree))
    return size, encode_frame(header, tree, digest=True)
