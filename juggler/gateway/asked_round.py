"""A round of sample requests that a gateway has yet to answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from juggler.gateway.served_module import ServedModule
from juggler.runtime.wire.v1 import training_pb2

_TELL_SECONDS = 30.0


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

    def fullness(self, modules: Mapping[str, ServedModule]) -> str:
        """For people: how many of its steps are here, of each module."""
        parts = []
        for each in self.requests.values():
            here, all_steps = modules[each.module_id].fullness()
            whose = "" if len(self.requests) == 1 else f" of module {each.module_id}"
            parts.append(f"{here:,} of {all_steps:,} steps{whose}")
        return ", ".join(parts)


class SlowRound:
    """Tells how full a batch is that takes long: after half a minute, one minute, two, and so on.

    Attributes:
        seconds: to the first time.
    """

    def __init__(self) -> None:
        self.seconds = _TELL_SECONDS
        self._of: AskedRound | None = None
        self._next = 0.0  # seconds since it was begun to wait
        self._since = 0.0

    def look(self, asked: Sequence[AskedRound], modules: Mapping[str, ServedModule]) -> str:
        """What is to be said now, for people; "": nothing.

        Args:
            asked: rounds without an answer, the oldest first.
            modules: of the gateway, by id.
        """
        if not asked:
            self._of = None
            return ""
        now = time.monotonic()
        if asked[0] is not self._of:
            self._of, self._since, self._next = asked[0], now, self.seconds
        waited = now - self._since
        if waited < self._next:
            return ""
        self._next = 2 * waited
        return f"has {asked[0].fullness(modules)} of its next batch after {waited:.0f} s"
