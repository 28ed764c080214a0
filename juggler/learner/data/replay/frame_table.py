"""FrameTable: a table of transitions whose observations are stacks of frames, each kept once."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from juggler.learner.data.replay.memory_columns import (
    MemoryColumns,
    any_leaf,
    runs_of,
    unlike,
)
from juggler.learner.data.replay.table import Leaving, Table
from juggler.runtime.connectors.frame_stack import FRAMES
from juggler.runtime.connectors.leaves import at, replaced
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.structures import tree_leaves, tree_map
from juggler.runtime.wire.trees import Path, Tree

_NONE = np.zeros(0, np.intp)
_AT_ONCE = 4096  # frames that are copied together
#: What rows observe: before each step [n, 1, ...], and after the last [n, ...].
_OBSERVED = (c.OBSERVATIONS, c.LAST_OBSERVATIONS)


class FrameTable(Table):
    """Keeps transitions, whose stacks share frames with those of their neighbours.

    Rows come with FRAMES [P, ...], and with the numbers of k frames in place of each stack. They
    leave the table as frames [n, 1, k, ...] and [n, k, ...]. A frame is kept as long as any row has
    it in a stack.
    """

    def __init__(self, capacity: int, *, row_steps: int = 1, directory: str = "") -> None:
        super().__init__(capacity, row_steps=row_steps, directory=directory)
        self._frames = _Frames(capacity, directory)
        self._stacks = np.zeros((capacity, 0), np.int64)  # [capacity, 2 k]

    def put(self, rows: dict[str, Any], leaving: Leaving | None = None) -> NDArray[np.intp]:
        rest = dict(rows)
        if (frames := rest.pop(FRAMES, None)) is None:
            raise unlike(f"only one side has {[FRAMES]}")
        paths = [path for path, _ in tree_leaves(frames)]
        numbers = [at(rest[name], paths[0]).flatten(1).cpu().numpy() for name in _OBSERVED]
        for name in _OBSERVED:  # they stay apart, since they count other slots in the table
            empty = dict.fromkeys(paths, at(rest[name], paths[0])[..., :0])
            rest[name] = replaced(rest[name], empty)
        stacks = np.concatenate(numbers, 1)[-self.capacity :]  # [n, 2 k]
        if not self._stacks.shape[1]:
            self._stacks = np.zeros((self.capacity, stacks.shape[1]), np.int64)
        kept = self._frames.keep(frames, stacks, any_leaf(rows).device)  # [n, 2 k]
        slots = super().put(rest, leaving)
        self._stacks[slots] = kept
        return slots

    def rows(self, slots: NDArray[np.intp]) -> dict[str, Any]:
        found = super().rows(slots)
        frames = self._frames.rows(self._stacks[slots])  # [B, 2 k, ...] each
        k = self._stacks.shape[1] // 2
        leaves: dict[Path, Any] = dict(tree_leaves(frames))
        before = {path: x[:, None, :k] for path, x in leaves.items()}  # [B, 1, k, ...]
        after = {path: x[:, k:] for path, x in leaves.items()}  # [B, k, ...]
        for name, stacks in zip(_OBSERVED, (before, after), strict=True):
            found[name] = replaced(found[name], stacks)
        return found

    def clear(self) -> None:
        super().clear()
        self._frames.clear()

    def state(self) -> dict[str, Tree]:
        stacks = {"stacks": self._stacks[: self.used].copy()}
        return {**super().state(), **stacks, FRAMES: self._frames.first()}

    def prepare(self, state: dict[str, Any]) -> int:
        stacks, count = state["stacks"], len(any_leaf({FRAMES: state[FRAMES]}))
        if stacks.shape[:1] != state["generations"].shape or not np.all(
            (stacks >= 0) & (stacks < count)
        ):
            raise ValueError("the checkpoint's replay table names frames that it does not hold")
        return super().prepare(state)

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        super().restore(state, device)
        stacks, frames = state["stacks"], tree_map(torch.from_numpy, state[FRAMES])
        live = np.flatnonzero(self.generations[: self.used])  # [size]
        self._stacks = np.zeros((self.capacity, stacks.shape[1]), np.int64)
        self._stacks[live] = self._frames.keep(frames, stacks[live], device)

    def _leave(self, slots: NDArray[np.intp]) -> None:
        super()._leave(slots)
        self._frames.release(self._stacks[slots])


class _Frames:
    """Frames, and by how many stacks each is held.

    Args:
        rows: about how many there will be at once; there may be more.
        directory: where they lie on disk; "": in memory.
    """

    def __init__(self, rows: int, directory: str) -> None:
        self._rows, self._directory = rows, directory
        self._columns: MemoryColumns | None = None
        self._used = 0  # slots that were ever used, the first ones
        self._free: NDArray[np.intp] = _NONE  # those of them that no stack holds
        self.clear()

    def keep(
        self, frames: Any, stacks: NDArray[np.int64], device: torch.device
    ) -> NDArray[np.int64]:
        """Keep, on a device, those of the frames [P, ...] that stacks [n, w] name -> their slots
        [n, w]. They are copied a part at a time: those of a checkpoint may be most of the memory.
        """
        held = np.bincount(stacks.ravel(), minlength=len(any_leaf({FRAMES: frames})))  # [P]
        wanted = held.nonzero()[0]  # [f]
        slots = self._taken(len(wanted))  # [f]
        for first in range(0, len(wanted), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            rows = {
                FRAMES: tree_map(partial(_chosen, torch.from_numpy(wanted[part]), device), frames)
            }
            if self._columns is None:
                self._columns = MemoryColumns(rows, len(self._holds), self._directory)
            self._columns.write(slots[part], runs_of(slots[part]), self._columns.checked(rows))
        self._holds[slots] = held[wanted]
        places = np.zeros(len(held), np.int64)  # [P]
        places[wanted] = slots
        return places[stacks]

    def rows(self, slots: NDArray[np.int64]) -> Any:
        """The frames in slots [n, w] -> [n, w, ...]."""
        assert self._columns is not None
        found = self._columns.take(slots.ravel())[FRAMES]  # [n w, ...]
        return tree_map(lambda x: x.view(slots.shape + x.shape[1:]), found)

    def release(self, slots: NDArray[np.int64]) -> None:
        """Stacks that named slots [n, w] are gone."""
        named = slots.ravel()  # [n w]
        np.subtract.at(self._holds, named, 1)
        free = np.unique(named[self._holds[named] == 0])
        self._free = np.concatenate([self._free, free])

    def first(self) -> Any:
        """All slots that were ever used, as arrays on the host."""
        return {} if self._columns is None else self._columns.first(self._used)[FRAMES]

    def clear(self) -> None:
        """Drop all frames."""
        self._holds = np.zeros(max(1, self._rows + self._rows // 4), np.int32)  # [slots]
        self._used, self._free = 0, _NONE

    def _taken(self, count: int) -> NDArray[np.intp]:
        """Free slots [count]."""
        freed = min(count, len(self._free))
        keep = len(self._free) - freed
        slots, self._free = self._free[keep:], self._free[:keep]
        new = np.arange(self._used, self._used + count - freed)
        self._used += len(new)
        if self._used > len(self._holds):
            self._grow(self._used + self._used // 4)
        return np.concatenate([slots, new])

    def _grow(self, slots: int) -> None:
        holds = np.zeros(slots, np.int32)
        holds[: len(self._holds)] = self._holds
        self._holds = holds
        if self._columns is not None:
            self._columns.grow(slots)


def _chosen(index: torch.Tensor, device: torch.device, frames: torch.Tensor) -> torch.Tensor:
    """Some of the frames [P, ...], on a device."""
    return frames.index_select(0, index.to(frames.device)).to(device)
