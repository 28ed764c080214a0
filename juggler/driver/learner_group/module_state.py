"""The state of a LearnerGroup's module, on its way from its shard and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import any_pb2

from juggler.runtime.wire.frames import FrameReader, Limits, encode_frame
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import shards_pb2, training_pb2

_STATE_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class ModuleState:
    """All that training has made of a module, as `Learner.save` gives it.

    Attributes:
        tree: parameters, optimizer and whatever the algorithm keeps, as arrays by name.
        extra: the rest, as JSON has it: "algorithm" and "updates".
    """

    tree: Mapping[str, Tree]
    extra: Mapping[str, Any]

    @classmethod
    def of(cls, replies: Sequence[any_pb2.Any]) -> ModuleState:
        """From the answers to a FetchModule.

        Raises:
            ValueError: they are no whole state.
        """
        reader = FrameReader(
            training_pb2.StateHeader, Limits(payload_bytes=_STATE_BYTES), digests=True
        )
        frames = [reader.feed(reply.value) for reply in replies]
        if not frames or (frame := frames[-1]) is None or not isinstance(frame.tree, dict):
            raise ValueError("a state that is not whole")
        return cls(frame.tree, json.loads(frame.header.extra))

    def commands(self, module_id: str, *, weights: bool = False) -> list[shards_pb2.LoadModule]:
        """What gives it to a shard; with `weights` the tree is one of weights alone."""
        header = training_pb2.StateHeader(extra=json.dumps(dict(self.extra)))
        commands = [
            shards_pb2.LoadModule(module_id=module_id, chunk=chunk, weights=weights)
            for chunk in encode_frame(header, self.tree, digest=True)
        ]
        commands[-1].last = True
        return commands
