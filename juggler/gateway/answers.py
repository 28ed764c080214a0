"""Messages of actions, written by hand: one for each batch of steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from juggler.gateway.row_layout import Layout
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from juggler.runtime.wire.varints import write_varint

#: Fields and wire types of simulator.proto.
_TO_SIMULATOR_ACTIONS = b"\x12"
_BATCH_SEQ, _BATCH_AGENTS = b"\x08", b"\x12"
_ACTIONS_ACTIONS = b"\x22"
_TENSOR_DATA = b"\x22"


class Part(NamedTuple):
    """The actions of one agent.

    Attributes:
        size: in bytes.
        pieces: the bytes.
    """

    size: int
    pieces: list[bytes]


def action_batch(seq: int, parts: Sequence[Part]) -> bytes:
    """A ToSimulator with an ActionBatch.

    Args:
        seq: of the batch of steps.
        parts: the actions of its agents.
    """
    number = write_varint(seq)
    size = 1 + len(number) + sum(part.size for part in parts)
    head = [_TO_SIMULATOR_ACTIONS, write_varint(size), _BATCH_SEQ, number]
    return b"".join(chain(head, *(part.pieces for part in parts)))


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
        # By agent and rows, of that version.
        self._beginnings: dict[tuple[int, int], tuple[int, list[bytes]]] = {}

    def part(self, agent: int, rows: int, data: Sequence[bytes], version: Version) -> Part:
        """
        Args:
            agent: its index in the session.
            rows: R.
            data: of each leaf, R rows.
            version: of the weights that acted.
        """
        if version != self._version:
            self._version, self._beginnings = version, {}
        key = agent, rows
        if key not in self._beginnings:
            self._beginnings[key] = self._written(agent, rows, version)
        size, beginnings = self._beginnings[key]
        return Part(size, [*chain.from_iterable(zip(beginnings, data, strict=True))])

    def _written(self, agent: int, rows: int, version: Version) -> tuple[int, list[bytes]]:
        """The size of the part, and the bytes before those of each leaf."""
        acted = to_message(version)
        head = pb.Actions(agent=agent, policy=self._policy, version=acted).SerializeToString()
        tensors = []
        for leaf in self._leaves:
            shape = (rows, *leaf.shape)
            tensor = pb.NamedTensor(path=leaf.path, dtype=leaf.number, shape=shape)
            begins = tensor.SerializeToString() + _TENSOR_DATA + write_varint(rows * leaf.row_bytes)
            size = len(begins) + rows * leaf.row_bytes
            tensors.append(_ACTIONS_ACTIONS + write_varint(size) + begins)
        size = len(head) + sum(map(len, tensors)) + rows * sum(x.row_bytes for x in self._leaves)
        tensors[0] = _BATCH_AGENTS + write_varint(size) + head + tensors[0]
        return len(_BATCH_AGENTS) + len(write_varint(size)) + size, tensors


def to_message(version: Version) -> pb.PolicyVersion:
    """The version of a policy as simulators are told it."""
    return pb.PolicyVersion(generation=version.generation, update=version.update)
