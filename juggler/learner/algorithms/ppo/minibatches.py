"""Minibatches: the steps or the sequences of a sample, dealt out anew for each pass over it.

Who gets what follows from a key and from the sample alone, by a hash: no random generator, nothing
that the host has to wait for, and the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from juggler.learner.core.learner_core import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map

_32_BITS = 2**32 - 1


def mixed(x: Tensor) -> Tensor:
    """Numbers that look drawn at random, another one for each x [...] -> [...], int64.

    x must be in [0, 2³²), as is the result: a bijection of xorshifts and multiplications, whose
    products stay below 2⁶³.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _32_BITS
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _32_BITS
    return x ^ (x >> 15)


def row_keys(contents: Tensor, live: Tensor) -> Tensor:
    """A number for each row of a sample by what its live steps hold -> [N], as `mixed` takes it.

    A row has the same one in whatever sample it is, so that a sample and its parts, each at a
    learner of its own, are dealt out alike.

    Args:
        contents: [N, T] floats that differ between rows, such as log-probabilities of actions.
        live: [N, T] bool
    """
    numbers = (contents * 2**20).to(torch.int64) & _32_BITS  # [N, T]
    steps = torch.arange(live.shape[1], device=live.device)  # [T]
    return (mixed(numbers ^ mixed(steps)) * live).sum(1) & _32_BITS  # [N]


def deal(key: Tensor, rows: Tensor, present: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places of a table, each to one of `count` minibatches.

    Every minibatch gets an equal part of every row, drawn at random, of what is present and of what
    is not. Where a row does not divide evenly, some of a minibatch's places are in no row.

    Args:
        key: [] another one, another deal; as `mixed` takes it, like those of rows.
        rows: [N] of each row.
        present: [N, T] bool
        count: k

    Returns:
        Which place each minibatch gets, [k, B] int64 that count through [N, T], and whether
        something is present there, [k, B] bool; B is N T / k or a little more.
    """
    n, t = present.shape
    width = -(-t // count)
    steps = torch.arange(t, device=present.device)  # [T]
    row_draws = mixed(rows ^ key)  # [N]
    draws = mixed(row_draws.unsqueeze(1) ^ steps)  # [N, T]
    order = (draws + (~present << 32)).argsort(1)  # [N, T] what is present first
    order = pad(order, (0, width * count - t), value=-1).view(n, width, count)  # -1: in no row
    # One after the other around the table, from another minibatch on in each row: rows that do not
    # go round evenly would all leave the last ones short.
    turns = torch.arange(count, device=present.device) + row_draws.unsqueeze(1)  # [N, k]
    turns = (turns % count).unsqueeze(1).expand(-1, width, -1)  # [N, width, k]
    dealt = order.gather(2, turns)  # [N, width, k]
    places = dealt.clamp(min=0) + t * torch.arange(n, device=present.device).view(n, 1, 1)
    places = places.movedim(2, 0).flatten(1)  # [k, B]
    there = (dealt >= 0).movedim(2, 0).flatten(1)  # [k, B]
    return places, present.flatten()[places] & there


class Table(NamedTuple):
    """One module's part of a sample, to be dealt out: its steps, or, of a module with a state, its
    segments of episodes, which are read as a whole."""

    columns: Columns  # of steps [N T, ...]; with segments, those of the sample, [N, T, ...]
    rows: Tensor  # [R] keys of the rows that are dealt out: of steps, or one row of segments
    present: Tensor  # [R, I] bool: where there is something to learn from

    @classmethod
    def of_steps(cls, columns: Columns) -> Table:
        """
        Args:
            columns: [N, T, ...]
        """
        flat = tree_map(lambda x: x.flatten(0, 1), columns)  # [N T, ...]
        return cls(flat, row_keys(columns[c.ACTION_LOGP], columns[c.LIVE]), columns[c.LIVE])

    @classmethod
    def of_segments(cls, columns: Columns) -> Table:
        """
        Args:
            columns: those of a sample.
        """
        rows = columns[c.SEGMENT_ROWS]  # [S]
        present = torch.ones((1, len(rows)), dtype=torch.bool, device=rows.device)  # [1, S]
        return cls(columns, rows.new_zeros(1), present)

    def minibatches(self, key: Tensor, count: int) -> Iterator[Columns]:
        """One after the other: steps [B, ...]; or all columns, with some of the segments."""
        for places, there in zip(*deal(key, self.rows, self.present, count), strict=True):
            if c.SEGMENT_ROWS not in self.columns:
                steps = tree_map(lambda x, at=places: x.index_select(0, at), self.columns)
                yield {**steps, c.LIVE: there}
            else:
                segments = {name: self.columns[name][places] for name in c.SEGMENTS}  # [B]
                segments[c.SEGMENT_LENGTHS] = segments[c.SEGMENT_LENGTHS] * there  # [B]
                yield {**self.columns, **segments}
