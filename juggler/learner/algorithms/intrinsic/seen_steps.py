"""The steps of a sample as random network distillation sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Columns
from juggler.learner.core.sequences import all_observations
from juggler.learner.core.transitions import DISCOUNTS, following, terminated
from juggler.runtime.connectors.recurrence import linear_recurrence
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_map


class Seen(NamedTuple):
    """Every observation of a sample once, and where each step's are among them."""

    observations: Any  # [M, ...]
    before: Tensor  # [N, T] int64
    after: Tensor  # [N, T] int64; where it is not known, any other one
    live: Tensor  # [N, T] bool
    known: Tensor  # [N, T] bool, live steps but those that terminate

    @classmethod
    def of(cls, columns: Columns) -> Seen:
        live = columns[c.LIVE]  # [N, T]
        before = torch.arange(live.numel(), device=live.device).view(live.shape)  # [N, T]
        if DISCOUNTS in columns:  # rows of one step each
            everything = tree_map(
                lambda x, last: torch.cat([x.flatten(0, 1), last]),
                columns[c.OBSERVATIONS],
                columns[c.LAST_OBSERVATIONS],
            )  # [N + N, ...]
            after = before + live.numel()  # [N, 1]
        else:
            everything, after = all_observations(columns), following(columns)
        return cls(everything, before, after, live, live & ~terminated(columns))


class Stream(NamedTuple):
    """The live steps of each row, one behind the other, as if nothing ended or was reset."""

    order: Tensor  # [N, T] int64: which step of the row is at each place
    live: Tensor  # [N, T] bool
    values: Tensor  # [N, T]
    next_values: Tensor  # [N, T]

    @classmethod
    def of(cls, live: Tensor, seen: Seen, values: Tensor) -> Stream:
        """Args:
        live: [N, T] bool, the steps to learn from.
        seen: of a sample.
        values: [M], of all its observations.
        """
        order = (~live).to(torch.int8).argsort(dim=1, stable=True)  # [N, T]
        places = torch.arange(live.shape[1], device=live.device)  # [T]
        count = live.sum(1, keepdim=True)  # [N, 1]
        # If the last live step terminated, the row may lack the beginning of the next episode, of
        # which nothing is better known than that the return goes on.
        after = torch.where(seen.known, seen.after, seen.before)  # [N, T]
        last = values[after].gather(1, order).gather(1, (count - 1).clamp(min=0))  # [N, 1]
        packed = values[seen.before].gather(1, order)  # [N, T]
        behind = torch.cat([packed[:, 1:], last], 1)  # [N, T]
        return cls(order, places < count, packed, torch.where(places == count - 1, last, behind))

    def packed(self, x: Tensor) -> Tensor:
        """Numbers of the steps of a sample [N, T], in the order of the stream."""
        return x.gather(1, self.order)

    def unpacked(self, x: Tensor) -> Tensor:
        """The inverse."""
        return torch.zeros_like(x).scatter(1, self.order, x)  # [N, T]


def along_rows(rewards: Tensor, live: Tensor, gamma: float) -> Tensor:
    """Discounted sums of rewards [N, T] up to each step of a row -> [N, T]. They begin at 0 with
    the row, and go on from one episode to the next."""
    carried = torch.where(live, gamma, 1.0).to(rewards.dtype)  # [N, T]
    # linear_recurrence runs backwards in time.
    return linear_recurrence(
        carried.flip(1), rewards.flip(1), torch.zeros_like(rewards[:, 0])
    ).flip(1)
