"""PerEpisode: a learner connector in plain Python, one episode at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from juggler.runtime.connectors.connector import Columns, LearnerConnector
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

_SEGMENT: Final = (c.SEGMENT_ROWS, c.SEGMENT_STARTS, c.SEGMENT_LENGTHS, c.SEGMENT_OFFSETS)

#: Columns that are not over [N, T], and `live`, which is true in every step of an episode.
_NOT_STEPS: Final = {
    *_SEGMENT,
    c.LIVE,
    c.STATES,
    c.LAST_OBSERVATIONS,
    c.FINAL_OBSERVATIONS,
    c.FINAL_ROWS,
    c.FINAL_STEPS,
}


class PerEpisode(LearnerConnector):
    """Calls a method for each stretch of an episode that lies within a row.

    That takes a call of Python for each of them, and waits for the device: a connector over whole
    batches is a hundred times faster. A subclass defines `episode`:

        class RewardAtTheEnd(PerEpisode):
            def episode(self, steps, offset):
                rewards = torch.zeros_like(steps["rewards"])
                rewards[-1] = steps["rewards"].sum()
                return {"rewards": rewards}
    """

    @abstractmethod
    def episode(self, steps: dict[str, Any], offset: int) -> Mapping[str, Tensor]:
        """Columns that shall be other than they were, or new ones; {}: none.

        Args:
            steps: the stretch's step columns [L, ...] by name, to be left as they are.
            offset: how many steps of the same episode came before.

        Returns:
            By name, [L, ...]. Steps of no episode keep what they had, and have 0 in new columns.
        """

    def __call__(self, columns: Columns) -> Columns:
        live = columns[c.LIVE]  # [N, T]
        changed: dict[str, Tensor] = {}
        stretches = torch.stack([columns[name] for name in _SEGMENT], 1)  # [S, 4]
        for row, start, length, offset in stretches.tolist():
            at = (row, slice(start, start + length))
            steps = {
                name: tree_map(lambda column, at=at: column[at], columns[name])
                for name in columns.keys() - _NOT_STEPS
            }
            for name, values in self.episode(steps, offset).items():
                if len(values) != length:
                    raise ValueError(
                        f"{type(self).__name__}.episode returned {name!r} of {len(values)} steps "
                        f"for an episode of {length}"
                    )
                if name not in changed:
                    changed[name] = _own(columns.get(name), live, values)
                changed[name][at] = values.to(changed[name].dtype)
        return columns | changed


def _own(column: Any, live: Tensor, values: Tensor) -> Tensor:
    """A copy of a column, or a new one for values [L, ...] -> [N, T, ...]."""
    if column is None:
        return values.new_zeros((*live.shape, *values.shape[1:]))
    assert isinstance(column, Tensor)
    return column.clone()
