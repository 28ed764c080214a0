"""Minibatches: the steps or sequences of a sample, dealt out anew for each epoch.

The deal is a hash of a key and of the sample. So it needs no random generator, the host waits for
nothing, and every device deals alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from juggler.learner.core.hashing import mixed
from juggler.learner.core.learner_core import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

_32_BITS = 2**32 - 1


def row_keys(contents: Tensor, live: Tensor) -> Tensor:
    """A hash of the live steps of each row of a sample -> [N], in the range of `mixed`.

    A row has the same hash in every sample, so that a sample and its parts at several learners are
    dealt out alike.

    Args:
        contents: [N, T] floats that differ between rows, such as log-probabilities of actions.
        live: [N, T] bool
    """
    numbers = (contents * 2**20).to(torch.int64) & _32_BITS  # [N, T]
    steps = torch.arange(live.shape[1], device=live.device)  # [T]
    return (mixed(numbers ^ mixed(steps)) * live).sum(1) & _32_BITS  # [N]


def deal(key: Tensor, rows: Tensor, present: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Deal the entries of a table out to `count` minibatches.

    Every minibatch gets an equal part of every row, at random: of the entries that are present, and
    of the others. If a row does not divide evenly, some places of minibatches stay empty.

    Args:
        key: [], in the range of `mixed`; each key gives another deal.
        rows: [N], the keys of the rows, in the same range.
        present: [N, T] bool.
        count: k.

    Returns:
        The indices of each minibatch's entries in the flattened table, [k, B] int64, and whether an
        entry is present there, [k, B] bool. B is N T / k or a little more.
    """
    n, t = present.shape
    width = -(-t // count)
    steps = torch.arange(t, device=present.device)  # [T]
    row_draws = mixed(rows ^ key)  # [N]
    draws = mixed(row_draws.unsqueeze(1) ^ steps)  # [N, T]
    order = (draws + (~present << 32)).argsort(1)  # [N, T] present entries first
    order = pad(order, (0, width * count - t), value=-1).view(n, width, count)  # -1: in no row
    # Each row deals in turns, beginning with another minibatch. Otherwise rows that do not divide
    # evenly would all leave the last minibatches short.
    turns = torch.arange(count, device=present.device) + row_draws.unsqueeze(1)  # [N, k]
    turns = (turns % count).unsqueeze(1).expand(-1, width, -1)  # [N, width, k]
    dealt = order.gather(2, turns)  # [N, width, k]
    places = dealt.clamp(min=0) + t * torch.arange(n, device=present.device).view(n, 1, 1)
    places = places.movedim(2, 0).flatten(1)  # [k, B]
    there = (dealt >= 0).movedim(2, 0).flatten(1)  # [k, B]
    return places, present.flatten()[places] & there


class Table(NamedTuple):
    """One module's part of a sample, to deal out: its steps or, for a module with a state, whole
    segments of episodes."""

    columns: Columns  # of steps [N T, ...], or of a sample with segments [N, T, ...]
    rows: Tensor  # [R] keys of rows of steps, or of one row of segments
    present: Tensor  # [R, I] bool: entries to learn from

    @classmethod
    def of_steps(cls, columns: Columns) -> Table:
        """
        Args:
            columns: [N, T, ...].
        """
        flat = tree_map(lambda x: x.flatten(0, 1), columns)  # [N T, ...]
        return cls(flat, row_keys(columns[c.ACTION_LOGP], columns[c.LIVE]), columns[c.LIVE])

    @classmethod
    def of_segments(cls, columns: Columns) -> Table:
        """
        Args:
            columns: of a sample.
        """
        rows = columns[c.SEGMENT_ROWS]  # [S]
        present = torch.ones((1, len(rows)), dtype=torch.bool, device=rows.device)  # [1, S]
        return cls(columns, rows.new_zeros(1), present)

    def minibatches(self, key: Tensor, count: int) -> Iterator[Columns]:
        """Yield minibatches: steps [B, ...], or all columns with some of the segments."""
        dealt, all_there = deal(key, self.rows, self.present, count)  # [k, B] both
        if c.SEGMENT_ROWS in self.columns:
            for places, there in zip(dealt, all_there, strict=True):
                segments = {name: self.columns[name][places] for name in c.SEGMENTS}  # [B]
                segments[c.SEGMENT_LENGTHS] = segments[c.SEGMENT_LENGTHS] * there  # [B]
                yield {**self.columns, **segments}
            return
        # Numbers are gathered for all minibatches at once; what may be large, such as images, when
        # its minibatch is due.
        numbers = {name: each for name, each in self.columns.items() if _is_number(each)}
        large = {name: each for name, each in self.columns.items() if name not in numbers}
        gathered = {name: each[dealt].unbind() for name, each in numbers.items()}  # k x [B]
        gathered[c.LIVE] = all_there.unbind()  # k x [B]
        for place, at in enumerate(dealt.unbind()):
            steps = tree_map(lambda x, at=at: x.index_select(0, at), large)  # [B, ...]
            yield {**steps, **{name: each[place] for name, each in gathered.items()}}


def _is_number(column: Any) -> bool:
    """Whether it holds one number for each step [N T]."""
    return isinstance(column, Tensor) and column.ndim == 1
