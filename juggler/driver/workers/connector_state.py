"""What one module's connectors have learned at all EnvRunners, and who has been told."""

from __future__ import annotations

from collections.abc import Mapping

from juggler.driver.core.group import worker_order
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.connectors.mergeable_state import State, from_bytes, merge, to_bytes
from juggler.runtime.connectors.moments import Moments, is_moments
from juggler.runtime.wire.trees import Tree

#: How many times as many samples there are when EnvRunners are told again. What has been learned
#: from so many changes little with one more batch, and would cost traffic with every request.
_WORTH_TELLING = 1.01


class ConnectorState:
    """Takes deltas from receipts, merges them in an order of their own, and tells EnvRunners.

    Args:
        state: of a checkpoint; none: nobody has learned anything.

    Attributes:
        merged: the state; {} where there is none, as where no connector learns.
    """

    def __init__(self, state: State | None = None) -> None:
        self.merged: State = state or {}
        self._waiting: dict[tuple[str, int], State] = {}  # deltas by EnvRunner and batch id
        self._told: dict[Worker, int] = {}  # which news each has
        self._news, self._content = 0, b""
        self._samples = 0.0  # behind the news
        self.announce()

    def take(self, worker_id: str, batch_id: int, delta: bytes) -> None:
        """A receipt's delta, to be merged later.

        Raises:
            ValueError: it is none, or of other connectors than those before.
        """
        if delta:
            state = from_bytes(delta)
            merge(self.merged or state, state)
            self._waiting[worker_id, batch_id] = state

    def merge_waiting(self) -> None:
        """Merge what was taken, in order of EnvRunners and their batches."""
        if not self._waiting:
            return
        for key in sorted(self._waiting, key=lambda key: (worker_order(key[0]), key[1])):
            delta = self._waiting.pop(key)
            self.merged = merge(self.merged, delta) if self.merged else delta
        if _samples(self.merged) >= _WORTH_TELLING * self._samples:
            self.announce()

    def announce(self) -> None:
        """All there is by now is news for everybody."""
        self._samples = _samples(self.merged)
        if self._samples:
            self._news, self._content = self._news + 1, to_bytes(self.merged)

    def news_for(self, worker: Worker) -> bytes:
        """What this worker has to be told with its next request; empty: nothing."""
        if self._told.get(worker, 0) == self._news:
            return b""
        self._told[worker] = self._news
        return self._content

    def left(self, worker: Worker) -> None:
        self._told.pop(worker, None)


def everything(connectors: Mapping[str, ConnectorState]) -> bytes:
    """What an evaluator is told: the states of all modules, by module id."""
    learned = {module_id: each.merged for module_id, each in connectors.items() if each.merged}
    return to_bytes(learned) if learned else b""


def _samples(state: Tree) -> float:
    """Behind all moments together."""
    if is_moments(state):
        return float(Moments.from_tree(state).count)
    assert isinstance(state, dict)
    return sum(_samples(branch) for branch in state.values())
