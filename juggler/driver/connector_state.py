"""What the connectors of all EnvRunners have learned together, and who has been told."""

from __future__ import annotations

from juggler.runtime.actors.hub import Worker
from juggler.runtime.connectors.mergeable_state import State, from_bytes, merge, to_bytes
from juggler.runtime.connectors.moments import Moments, is_moments
from juggler.runtime.wire.trees import Tree

#: How many times as many samples there are when EnvRunners are told again. What has been learned
#: from so many changes little with one more batch, and would cost traffic with every request.
_WORTH_TELLING = 1.01


class ConnectorState:
    """Takes deltas from receipts, merges them in order of their batches, and tells EnvRunners.

    Args:
        state: of a checkpoint; none: nobody has learned anything.

    Attributes:
        merged: the state; {} where there is none, as where no connector learns.
    """

    def __init__(self, state: State | None = None) -> None:
        self.merged: State = state or {}
        self._waiting: dict[int, State] = {}  # deltas by batch id
        self._told: dict[Worker, int] = {}  # which news each has
        self._news, self._content = 0, b""
        self._samples = 0.0  # behind the news
        self._announce()

    def take(self, batch_id: int, delta: bytes) -> None:
        """A receipt's delta, to be merged later.

        Raises:
            ValueError: it is none, or of other connectors than those before.
        """
        if delta:
            state = from_bytes(delta)
            merge(self.merged or state, state)
            self._waiting[batch_id] = state

    def merge_waiting(self) -> None:
        """Merge what was taken, in the order of batch ids."""
        if not self._waiting:
            return
        for batch_id in sorted(self._waiting):
            delta = self._waiting.pop(batch_id)
            self.merged = merge(self.merged, delta) if self.merged else delta
        self._announce()

    def news_for(self, worker: Worker) -> bytes:
        """What this worker has to be told with its next request; empty: nothing."""
        if self._told.get(worker, 0) == self._news:
            return b""
        self._told[worker] = self._news
        return self._content

    def everything(self) -> bytes:
        """For a worker that is told with every request."""
        return self._content

    def left(self, worker: Worker) -> None:
        self._told.pop(worker, None)

    def _announce(self) -> None:
        samples = _samples(self.merged)
        if samples and samples >= _WORTH_TELLING * self._samples:
            self._samples, self._news = samples, self._news + 1
            self._content = to_bytes(self.merged)


def _samples(state: Tree) -> float:
    """Behind all moments together."""
    if is_moments(state):
        return float(Moments.from_tree(state).count)
    assert isinstance(state, dict)
    return sum(_samples(branch) for branch in state.values())
