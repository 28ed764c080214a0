"""Replay: a source that keeps what arrives, and draws from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from juggler.learner.data.replay.sum_tree import SumTree
from juggler.learner.data.replay.table import Table
from juggler.learner.data.sources import NEW_STEPS, Columns, DataSource, Sample, Sums, alone
from juggler.runtime.modules import columns as c
from juggler.runtime.wire.trees import Tree

#: A column of a drawn sample: the weight of each row in a loss [B].
IMPORTANCE_WEIGHTS: Final = "importance_weights"

_LEAST_PRIORITY = 1e-6  # of a row that was learned from, so that it can be drawn again


class Replay(DataSource):
    """Keeps the newest rows in a table, and draws samples from it at a fixed ratio to what arrives.

    Samples arrive as fast as they are learned from. So the ratio holds exactly, whoever is faster,
    and nothing is thrown away for it. What is left of an arrival that is no whole sample is carried
    over to the next one.

    Rows are drawn independently, with replacement: uniformly or, with a priority exponent α above
    0, with probability P(i) = p_i^α / Σ p_k^α, where p is the priority that the last step gave a
    row (Schaul et al. 2016, "Prioritized Experience Replay"). A new row has the largest priority
    that was ever given. Importance weights are (N P(i))^-β, divided by the largest in the sample.

    Args:
        rows: what is kept of an arriving sample, of one module: by name, tensors [n, ...] or trees
            of them; {}: nothing.
        capacity: the most rows of a module, or whatever `table` takes.
        size: B, rows in a drawn sample.
        ratio: how often a row is drawn on average, if it stays for long.
        begin: how many live steps must have arrived before the first draw, at all learners of a
            group.
        priority_exponent: α.
        importance_exponent: β.
        saved: whether `state` holds the table. Else whoever restores it begins with an empty one.
        seed: of the draws.
        table: makes the table of a module, of a capacity.

    Attributes:
        stale_priorities: how many priorities came too late, for rows that had been written over.
    """

    def __init__(
        self,
        rows: Callable[[Columns], dict[str, Any]],
        *,
        capacity: int,
        size: int,
        ratio: float,
        begin: int = 0,
        priority_exponent: float = 0.0,
        importance_exponent: float = 0.0,
        saved: bool = True,
        seed: int = 0,
        table: Callable[[int], Table] = Table,
    ) -> None:
        self._make_table = table
        self._rows, self._capacity, self._size = rows, capacity, size
        self._ratio, self._begin = ratio, begin
        self._alpha, self._beta = priority_exponent, importance_exponent
        self._saved, self._seed = saved, seed
        self._start()

    def add(self, sample: Sample, sums: Sums = alone) -> Iterator[Sample]:
        """Take a sample, and draw others, each one when it is asked for: so each draw knows the
        priorities of those before it."""
        for module_id, columns in sample.items():
            rows = self._rows(columns)
            kept = self._kept(module_id)
            count = len(_leaf(rows)) if rows else 0
            if count:
                kept.put(rows, self._alpha)
            steps = rows[c.LIVE].sum() if c.LIVE in rows else count
            # All learners of a group make the same number of steps.
            told = torch.zeros(3, dtype=torch.float64, device=_leaf(columns).device)  # [3]
            told[0], told[1], told[2] = count, steps, 1
            arrived, live, learners = sums(told).tolist()
            kept.arrived(arrived / learners, round(live), self._begin, self._ratio)
        while drawn := {
            module_id: self._draw(self._modules[module_id])
            for module_id in sample
            if self._modules[module_id].due >= self._size
        }:
            yield drawn

    def learned(self, priorities: Mapping[str, Tensor] | None) -> None:
        """Take the priorities [B] of the rows drawn last. Those of rows that have been written over
        since are ignored."""
        if not self._alpha or not priorities:
            return
        for module_id, given in priorities.items():
            kept = self._modules[module_id]
            same = kept.table.generations[kept.drawn] == kept.drawn_generations  # [B]
            self.stale_priorities += int((~same).sum())
            values = given.detach().cpu().double().numpy()  # [B]
            usable = same & np.isfinite(values)  # [B]
            kept.prioritize(kept.drawn[usable], values[usable], self._alpha)

    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        return {module_id: kept.metrics() for module_id, kept in self._modules.items()}

    def clear(self) -> None:
        if not self._saved:
            self._start()

    def state(self) -> dict[str, Tree]:
        if not self._saved:
            return {}
        states = {key: kept.state(self._alpha) for key, kept in self._modules.items()}
        return {"generator": _words_of(self._generator), "modules": states} if states else {}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._start()
        if not state or not self._saved:
            return
        try:
            self._generator.bit_generator.state = _state_of(state["generator"])
            for module_id, own in state["modules"].items():
                self._kept(module_id).restore(own, device, self._alpha)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the checkpoint holds no replay table: {error!r}") from None

    def _start(self) -> None:
        self._modules: dict[str, _Kept] = {}
        self._generator = np.random.Generator(np.random.PCG64(self._seed))
        self.stale_priorities = 0

    def _kept(self, module_id: str) -> _Kept:
        if module_id not in self._modules:
            table = self._make_table(self._capacity)
            self._modules[module_id] = _Kept(table, prioritized=self._alpha > 0)
        return self._modules[module_id]

    def _draw(self, kept: _Kept) -> dict[str, Any]:
        table, tree = kept.table, kept.tree
        weights = np.ones(self._size, np.float32)  # [B]
        if self._alpha:
            slots = tree.find(self._generator.random(self._size) * tree.total)  # [B]
            shares = tree[slots] / tree.total  # [B]
            weights = ((shares.min() / shares) ** self._beta).astype(np.float32)
        else:
            slots = self._generator.integers(table.size, size=self._size)  # [B]
        kept.drawn, kept.drawn_generations = slots, table.generations[slots]
        kept.took(self._size)
        rows = table.rows(slots)
        device = _leaf(rows).device
        rows[IMPORTANCE_WEIGHTS] = torch.from_numpy(weights).to(device)  # [B]
        rows[NEW_STEPS] = torch.tensor(kept.new_steps, device=device)  # []
        kept.new_steps = 0
        return rows


class _Kept:
    """What is kept of one module's rows."""

    def __init__(self, table: Table, *, prioritized: bool) -> None:
        self.table = table
        self.tree = SumTree(table.capacity if prioritized else 1)
        self.due = 0.0  # rows that are still to be drawn for those that arrived
        self.new_steps = 0  # at all learners, that no draw has told of
        self.drawn: NDArray[np.intp] = np.zeros(0, np.intp)  # [B] slots
        self.drawn_generations = np.zeros(0, np.int64)  # [B]
        self._highest = 1.0  # of all priorities that were given
        self._waiting = 0  # steps that arrived, also before the first draw
        # Since draws may begin: rows that arrived, as this learner's share of those at all learners
        # of a group; steps that arrived at all of them; rows drawn, and samples.
        self._counts = np.zeros(4)

    def put(self, rows: dict[str, Any], alpha: float) -> None:
        moved = self.table.make_room(rows)
        if moved is not None and alpha:
            weights = self.tree[moved]  # [n]
            self.tree = SumTree(self.table.capacity)
            self.tree[np.arange(len(moved))] = weights
        slots = self.table.put(rows)
        if alpha:
            self.tree[slots] = np.full(len(slots), self._highest**alpha)  # [n]

    def arrived(self, rows: float, steps: int, begin: int, ratio: float) -> None:
        """Note how many rows arrived, as this learner's share of those at all learners, and how
        many steps at all of them."""
        self.new_steps += steps
        self._waiting += steps
        if self._waiting >= begin and self.table.size:
            self.due += rows * ratio
            self._counts += rows, steps, 0, 0

    def took(self, rows: int) -> None:
        """Note that a sample of so many rows was drawn."""
        self.due -= rows
        self._counts += 0, 0, rows, 1

    def metrics(self) -> dict[str, float]:
        rows, steps, drawn, samples = self._counts.tolist()
        return {
            "replay_rows": float(self.table.size),
            "samples_per_insert": drawn / max(rows, 1),
            "updates_per_step": samples / max(steps, 1),
        }

    def prioritize(
        self, slots: NDArray[np.intp], values: NDArray[np.float64], alpha: float
    ) -> None:
        if len(values):
            values = np.maximum(values, _LEAST_PRIORITY)  # [b]
            self._highest = max(self._highest, float(values.max()))
            self.tree[slots] = values**alpha

    def state(self, alpha: float) -> dict[str, Tree]:
        slots = np.arange(self.table.size)
        weights = self.tree[slots].copy() if alpha else np.zeros(0)
        scalars = [self.due, self.new_steps, self._highest, self._waiting, alpha]
        return {
            "table": self.table.state(),
            "weights": weights,
            "counts": np.array([*scalars, *self._counts]),  # [9]
        }

    def restore(self, state: Mapping[str, Any], device: torch.device, alpha: float) -> None:
        self.table.restore(state["table"], device)
        self.due, new_steps, self._highest, waiting, before, *counts = state["counts"].tolist()
        self.new_steps, self._waiting, self._counts = int(new_steps), int(waiting), np.array(counts)
        if not alpha:
            return
        weights = state["weights"]  # [n], with the exponent of the run that saved them
        if not before:
            weights = np.full(self.table.size, self._highest**alpha)
        elif alpha != before:
            weights = weights ** (alpha / before)
        self.tree = SumTree(self.table.capacity)
        self.tree[np.arange(len(weights))] = weights


def _leaf(tree: Any) -> Tensor:
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values()))
    return tree


_WORD = (1 << 64) - 1


def _words_of(generator: np.random.Generator) -> NDArray[np.uint64]:
    """The state of a PCG64 as numbers [6]."""
    told: Any = generator.bit_generator.state
    state, increment = told["state"]["state"], told["state"]["inc"]
    words = [state & _WORD, state >> 64, increment & _WORD, increment >> 64]
    return np.array([*words, told["has_uint32"], told["uinteger"]], np.uint64)


def _state_of(words: NDArray[np.uint64]) -> dict[str, Any]:
    low, high, increment_low, increment_high, has_uint32, uinteger = map(int, words)
    return {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": increment_high << 64 | increment_low},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
