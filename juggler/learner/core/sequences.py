"""The steps of a sample as sequences: what a module with a state reads, and where its outputs go.

A sequence is the stretch of one episode within one row (a segment), followed by the observation
after its last step, whose value the return of a stretch that is not the end is estimated with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map


def all_observations(columns: Columns) -> Any:
    """Every observation of a sample once: tree [N T + N + K, ...].

    Those before each step, row by row; those after each row; the final ones.
    """
    return tree_map(
        lambda before, last, final: torch.cat([before.flatten(0, 1), last, final]),
        columns[c.OBSERVATIONS],
        columns[c.LAST_OBSERVATIONS],
        columns[c.FINAL_OBSERVATIONS],
    )


class Sequences(NamedTuple):
    """Where the S sequences of a sample lie in its rows."""

    rows: Tensor  # [S]
    starts: Tensor  # [S] first step
    lengths: Tensor  # [S] steps; 0 or less: none
    offsets: Tensor  # [S] steps of the same episode before them

    @classmethod
    def of(cls, columns: Columns) -> Sequences:
        """One for each segment of a sample. If it has none, as nothing in it is live, its rows."""
        rows = columns[c.SEGMENT_ROWS]  # [S]
        if len(rows):
            starts, lengths = columns[c.SEGMENT_STARTS], columns[c.SEGMENT_LENGTHS]  # [S]
            return cls(rows, starts, lengths, columns[c.SEGMENT_OFFSETS])
        n, t = columns[c.LIVE].shape
        rows = torch.arange(n, device=rows.device)  # [S = N]
        return cls(rows, torch.zeros_like(rows), torch.full_like(rows, t), torch.zeros_like(rows))

    def without_first(self, steps: Tensor) -> Sequences:
        """The same sequences without so many of their first steps [S]."""
        return Sequences(self.rows, self.starts + steps, self.lengths - steps, self.offsets + steps)

    def longest(self) -> int:
        """Steps of the longest. The host waits for the device here: it has to know the shape of
        what it asks for."""
        return int(self.lengths.max())

    def observed(self, columns: Columns, length: int) -> Tensor:
        """Which of `all_observations` each sequence reads -> [S, length], int64.

        The one after a sequence's last step is read again and again up to `length`.
        """
        n, t = columns[c.LIVE].shape
        final_rows, final_steps = columns[c.FINAL_ROWS], columns[c.FINAL_STEPS]  # [K]
        finals = self.rows.new_zeros((n, t))  # [N, T]
        finals[final_rows, final_steps] = torch.arange(
            n * t + n, n * t + n + len(final_rows), device=finals.device
        )
        stops = self.starts + self.lengths  # [S]
        follows = torch.where(stops < t, self.rows * t + stops, n * t + self.rows)  # [S]
        end = self.rows, stops - 1
        after = torch.where(columns[c.TRUNCATED][end], finals[end], follows)  # [S]
        steps = torch.arange(length, device=self.rows.device)  # [length]
        within = (self.rows * t + self.starts).unsqueeze(1) + steps  # [S, length]
        return torch.where(steps < self.lengths.unsqueeze(1), within, after.unsqueeze(1))

    def places(self, columns: Columns, length: int) -> Tensor:
        """Where the steps of the sample are in the sequences, or -1 where in none -> [N, T], int64.

        Args:
            columns: of the sample.
            length: of the padded sequences; their places count through [S, length].
        """
        n, t = columns[c.LIVE].shape
        steps = torch.arange(length, device=self.rows.device)  # [length]
        within = (self.rows * t + self.starts).unsqueeze(1) + steps  # [S, length]
        nowhere = n * t
        targets = torch.where(steps < self.lengths.unsqueeze(1), within, nowhere)  # [S, length]
        places = self.rows.new_full((n * t + 1,), -1)
        places[targets.flatten()] = torch.arange(targets.numel(), device=places.device)
        return places[:nowhere].view(n, t)  # [N, T]
