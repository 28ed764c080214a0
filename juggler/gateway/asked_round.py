"""A round of sample requests that a gateway has yet to answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from juggler.gateway.served_module import ServedModule
from juggler.runtime.wire.v1 import training_pb2


@dataclass(frozen=True, slots=True)
class AskedRound:
    """
    Attributes:
        requests: by command id, one for each module.
        at: when it came, in seconds of `time.monotonic`.
    """

    requests: dict[int, training_pb2.SampleRequest]
    at: float

    def is_for(self, module_id: str) -> bool:
        """Whether it has a request for a module."""
        return any(each.module_id == module_id for each in self.requests.values())

    def can_begin(self, modules: Mapping[str, ServedModule]) -> bool:
        """Whether the weights of its requests are here, or their learners are gone.

        Args:
            modules: of the gateway, by id.

        Raises:
            LearnerOutOfReach: no weights came for long.
        """
        each = self.requests.values()
        return all(modules[one.module_id].can_begin(one, self.at) for one in each)

    def is_over(self, modules: Mapping[str, ServedModule]) -> bool:
        """Whether each of its modules has a batch, or one has two."""
        asked = [modules[each.module_id] for each in self.requests.values()]
        return all(module.complete >= module.rows for module in asked) or any(
            module.complete >= 2 * module.rows for module in asked
        )
