"""Actions as bytes on the wire, written by hand: one message for each batch of steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from juggler.envrunner.gateway.layout import Layout
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_KINDS = 64  # of batches whose beginnings are kept

#: Fields and wire types of simulator.proto.
_TO_SIMULATOR_ACTIONS = b"\x12"
_BATCH_SEQ, _BATCH_AGENTS = b"\x08", b"\x12"
_ACTIONS_ACTIONS = b"\x22"
_TENSOR_DATA = b"\x22"


class Answers:
    """
    Args:
        layout: of actions.
        policy: who acts.
    """

    def __init__(self, layout: Layout, policy: str) -> None:
        self._leaves = layout.leaves
        self._policy = policy
        self._beginnings = lru_cache(_KINDS)(self._written)

    def message(self, seq: int, rows: int, data: Sequence[bytes], version: Version) -> bytes:
        """A ToSimulator with an ActionBatch.

        Args:
            seq: of the batch of steps.
            rows: R.
            data: of each leaf, R rows.
            version: of the weights that acted.
        """
        head, tensors = self._beginnings(rows, version)
        parts = [head]
        for tensor, content in zip(tensors, data, strict=True):
            parts += (tensor, content)
        actions = b"".join(parts)
        batch = b"".join((_BATCH_SEQ, varint(seq), _BATCH_AGENTS, varint(len(actions)), actions))
        return b"".join((_TO_SIMULATOR_ACTIONS, varint(len(batch)), batch))

    def _written(self, rows: int, version: Version) -> tuple[bytes, list[bytes]]:
        """What comes before the bytes of the leaves."""
        newest = pb.PolicyVersion(generation=version.generation, update=version.update)
        head = pb.Actions(policy=self._policy, version=newest).SerializeToString()
        tensors = []
        for leaf in self._leaves:
            shape = (rows, *leaf.shape)
            tensor = pb.NamedTensor(path=leaf.path, dtype=leaf.number, shape=shape)
            begins = tensor.SerializeToString() + _TENSOR_DATA + varint(rows * leaf.row_bytes)
            size = len(begins) + rows * leaf.row_bytes
            tensors.append(_ACTIONS_ACTIONS + varint(size) + begins)
        return head, tensors


def varint(number: int) -> bytes:
    """As protobuf writes it."""
    if number < 128:
        return bytes((number,))
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
