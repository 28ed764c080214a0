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

#: Columns without the dimensions [N, T], and `live`, which is true at every step of an episode.
_NOT_STEPS: Final = {
    *_SEGMENT,
    c.LIVE,
    c.STATES,
    c.LAST_OBSERVATIONS,
    c.FINAL_OBSERVATIONS,
    c.LAST_CRITIC_OBSERVATIONS,
    c.FINAL_CRITIC_OBSERVATIONS,
    c.FINAL_ROWS,
    c.FINAL_STEPS,
}


class PerEpisode(LearnerConnector):
    """Calls a method for each segment of an episode within a row.

    This makes a Python call for each segment and waits for the device; a connector over whole
    batches is a hundred times faster. A subclass defines `episode`:

        class RewardAtTheEnd(PerEpisode):
            def episode(self, steps, offset):
                rewards = torch.zeros_like(steps["rewards"])
                rewards[-1] = steps["rewards"].sum()
                return {"rewards": rewards}
    """

    @abstractmethod
    def episode(self, steps: dict[str, Any], offset: int) -> Mapping[str, Tensor]:
        """Changed columns, or new ones; {} for none.

        Args:
            steps: the segment's step columns [L, ...] by name. Do not change them.
            offset: the number of earlier steps of the same episode.

        Returns:
            Columns [L, ...] by name. Steps outside of episodes keep their values, and have 0 in new
                columns.
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
