"""Ranked: a source that says at which learner of a group each sample is learned from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from juggler.learner.data.sources import Columns, DataSource, Sums, alone
from juggler.runtime.modules.columns import LIVE
from juggler.runtime.wire.trees import Tree

#: A column [] int64: the rank that the learner's source was told last; 0 before.
RANK: Final = "learner_rank"


class Ranked(DataSource):
    """Gives what another source gives, with a column `RANK`.

    Learners of a group have one state, so that a core which draws by it draws the same at all of
    them. With this column it can draw apart.
    """

    def __init__(self, source: DataSource) -> None:
        self._source, self._rank = source, 0
        self.keeps_frames, self.keeps_rows = source.keeps_frames, source.keeps_rows

    def add(self, sample: Columns, sums: Sums = alone) -> Iterator[Columns]:
        for due in self._source.add(sample, sums):
            yield {**due, RANK: torch.tensor(self._rank, device=due[LIVE].device)}

    def expect(self, sample: Columns) -> float:
        return self._source.expect(sample)

    def update_priorities(self, priorities: Tensor | None) -> None:
        self._source.update_priorities(priorities)

    def try_out(self) -> None:
        self._source.try_out()

    def why_alone(self) -> str:
        return self._source.why_alone()

    def taken_in(self) -> int:
        return self._source.taken_in()

    def metrics(self) -> Mapping[str, float]:
        return self._source.metrics()

    def books(self) -> Mapping[str, float]:
        return self._source.books()

    def draw_apart(self, rank: int) -> None:
        self._rank = rank
        self._source.draw_apart(rank)

    def clear(self) -> None:
        self._source.clear()

    def state(self) -> dict[str, Tree]:
        return self._source.state()

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._source.restore(state, device)
