"""What batches and weights are keyed by: a module, and a version of its weights."""

from __future__ import annotations

from typing import NamedTuple

from juggler.runtime.wire.v1 import training_pb2

#: The id of the module that is trained, where a run has one alone.
DEFAULT_MODULE = "default"


class Version(NamedTuple):
    """Of weights: compared in this order, and never goes backwards."""

    generation: int  # of the learner group that made them
    update: int

    @classmethod
    def of(cls, message: training_pb2.WeightsVersion) -> Version:
        return cls(message.generation, message.update)

    def message(self) -> training_pb2.WeightsVersion:
        return training_pb2.WeightsVersion(generation=self.generation, update=self.update)
