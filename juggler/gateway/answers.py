"""Messages of actions, written by hand: one for each batch of steps."""

from __future__ import annotations

from collections.abc import Sequence

from juggler.gateway.row_layout import Layout
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb

#: Fields and wire types of simulator.proto.
_TO_SIMULATOR_ACTIONS = b"\x12"
_BATCH_SEQ, _BATCH_AGENTS = b"\x08", b"\x12"
_ACTIONS_ACTIONS = b"\x22"
_TENSOR_DATA = b"\x22"


class Answers:
    """
    Args:
        layout: of actions.
        policy: the name of the policy that acts.
    """

    def __init__(self, layout: Layout, policy: str) -> None:
        self._leaves = layout.leaves
        self._policy = policy
        self._version: Version | None = None
        self._beginnings: dict[int, tuple[int, list[bytes]]] = {}  # by rows, of that version

    def message(self, seq: int, rows: int, data: Sequence[bytes], version: Version) -> bytes:
        """A ToSimulator with an ActionBatch.

        Args:
            seq: of the batch of steps.
            rows: R.
            data: of each leaf, R rows.
            version: of the weights that acted.
        """
        if version != self._version:
            self._version, self._beginnings = version, {}
        if rows not in self._beginnings:
            self._beginnings[rows] = self._written(rows, version)
        size, beginnings = self._beginnings[rows]
        number = varint(seq)
        parts = [_TO_SIMULATOR_ACTIONS, varint(1 + len(number) + size), _BATCH_SEQ, number]
        for beginning, content in zip(beginnings, data, strict=True):
            parts += (beginning, content)
        return b"".join(parts)

    def _written(self, rows: int, version: Version) -> tuple[int, list[bytes]]:
        """The size of the message, and the bytes before those of each leaf."""
        newest = pb.PolicyVersion(generation=version.generation, update=version.update)
        head = pb.Actions(policy=self._policy, version=newest).SerializeToString()
        tensors = []
        for leaf in self._leaves:
            shape = (rows, *leaf.shape)
            tensor = pb.NamedTensor(path=leaf.path, dtype=leaf.number, shape=shape)
            begins = tensor.SerializeToString() + _TENSOR_DATA + varint(rows * leaf.row_bytes)
            size = len(begins) + rows * leaf.row_bytes
            tensors.append(_ACTIONS_ACTIONS + varint(size) + begins)
        size = len(head) + sum(map(len, tensors)) + rows * sum(x.row_bytes for x in self._leaves)
        tensors[0] = _BATCH_AGENTS + varint(size) + head + tensors[0]
        return len(_BATCH_AGENTS) + len(varint(size)) + size, tensors


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    if number < 128:
        return bytes((number,))
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
