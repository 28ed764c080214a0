"""The steps of a sample as sequences, for modules with a state.

A sequence is a segment (the stretch of one episode within one row), followed by the observation
after its last step. The return of a segment that does not end its episode is bootstrapped from that
observation's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map


def all_observations(columns: Columns) -> Any:
    """Every observation of a sample once -> tree [N T + N + K, ...].

    First come those before each step, row by row, then those after each row, then the final ones.

    Where a mask has no legal action, as it may where an episode was cut off, all are legal: else
    its best action would have the value of an illegal one, from which returns would go on.
    """
    observations = _joined(columns, c.OBSERVED)
    mask = observations.get(c.ACTION_MASK) if isinstance(observations, Mapping) else None
    if not isinstance(mask, Tensor):
        return observations
    none = ~(mask != 0).any(-1, keepdim=True)  # [N T + N + K, 1]
    return {**observations, c.ACTION_MASK: torch.where(none, torch.ones_like(mask), mask)}


def all_seen(columns: Columns) -> dict[str, Any]:
    """`all_observations` as "observations", and those of a critic that sees more than its agent as
    "critic_observations", in the same order."""
    seen = {c.OBSERVATIONS: all_observations(columns)}
    if c.CRITIC_OBSERVATIONS in columns:
        seen[c.CRITIC_OBSERVATIONS] = _joined(columns, c.OBSERVED_BY_CRITIC)
    return seen


def _joined(columns: Columns, names: Iterable[str]) -> Any:
    return tree_map(
        lambda before, last, final: torch.cat([before.flatten(0, 1), last, final]),
        *(columns[name] for name in names),
    )


class Sequences(NamedTuple):
    """Where the S sequences of a sample lie in its rows."""

    rows: Tensor  # [S]
    starts: Tensor  # [S] first step
    lengths: Tensor  # [S] steps; 0 or less: the sequence is empty
    offsets: Tensor  # [S] steps of the same episode before them

    @classmethod
    def of(cls, columns: Columns) -> Sequences:
        """One sequence for each segment; in a sample without a live step, one for each row."""
        rows = columns[c.SEGMENT_ROWS]  # [S]
        if len(rows):
            starts, lengths = columns[c.SEGMENT_STARTS], columns[c.SEGMENT_LENGTHS]  # [S]
            return cls(rows, starts, lengths, columns[c.SEGMENT_OFFSETS])
        n, t = columns[c.LIVE].shape
        rows = torch.arange(n, device=rows.device)  # [S = N]
        return cls(rows, torch.zeros_like(rows), torch.full_like(rows, t), torch.zeros_like(rows))

    def without_first(self, steps: Tensor) -> Sequences:
        """The same sequences without their first steps; `steps` [S] says how many."""
        return Sequences(self.rows, self.starts + steps, self.lengths - steps, self.offsets + steps)

    def longest(self) -> int:
        """The length of the longest sequence. The host waits for the device here, because the
        length is a dimension of the tensors that follow."""
        return int(self.lengths.max())

    def observed(self, columns: Columns, length: int) -> Tensor:
        """The indices in `all_observations` that each sequence reads -> [S, length], int64.

        The observation after a sequence's last step is repeated up to `length`.
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
        """Where each step of the sample is in the sequences -> [N, T], int64; -1: in none.

        Args:
            columns: the sample's columns.
            length: the length of the padded sequences; the result indexes [S, length], flattened.
        """
        n, t = columns[c.LIVE].shape
        steps = torch.arange(length, device=self.rows.device)  # [length]
        within = (self.rows * t + self.starts).unsqueeze(1) + steps  # [S, length]
        nowhere = n * t
        targets = torch.where(steps < self.lengths.unsqueeze(1), within, nowhere)  # [S, length]
        places = self.rows.new_full((n * t + 1,), -1)
        places[targets.flatten()] = torch.arange(targets.numel(), device=places.device)
        return places[:nowhere].view(n, t)  # [N, T]
