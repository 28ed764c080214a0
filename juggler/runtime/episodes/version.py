"""The version of weights, and the default module id."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from juggler.runtime.wire.v1 import training_pb2

#: Id of the module in a run that trains only one.
DEFAULT_MODULE = "default"


class Version(NamedTuple):
    """The version of weights: ordered by fields, never decreasing."""

    generation: int  # of the learner group that made the weights
    update: int

    @classmethod
    def of(cls, message: training_pb2.WeightsVersion) -> Version:
        return cls(message.generation, message.update)

    @classmethod
    def of_run(cls, versions: Iterable[Version]) -> Version:
        """Return the version of a run: the sums over its modules.

        It never decreases. When a module returns to an earlier update its generation grows, and
        with it the sum, while the maximum could decrease.
        """
        generations, updates = zip(*versions, strict=True)
        return cls(sum(generations), sum(updates))

    def message(self) -> training_pb2.WeightsVersion:
        return training_pb2.WeightsVersion(generation=self.generation, update=self.update)
