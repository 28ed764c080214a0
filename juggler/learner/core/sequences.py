"""The steps of a sample as sequences, for modules with a state.

A sequence is a segment (the part of one episode within one row), followed by the observation after
its last step. If a segment does not end its episode, its return is bootstrapped from that
observation's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.forward import Forward
from juggler.learner.core.learner_core import Columns
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.acting_part import restarted
from juggler.runtime.modules.rl_module import Batch
from juggler.runtime.wire.structures import tree_map


def all_observations(columns: Columns) -> Any:
    """Concatenate all observations, tree [N T + N + K, ...].

    The order is: before each step, row by row; after each row; final observations.

    A mask without a legal action, as after a cut-off episode, becomes all legal. Otherwise returns
    would bootstrap from an illegal action.
    """
    observations = _joined(columns, c.OBSERVED)
    mask = observations.get(c.ACTION_MASK) if isinstance(observations, Mapping) else None
    if not isinstance(mask, Tensor):
        return observations
    none = ~(mask != 0).any(-1, keepdim=True)  # [N T + N + K, 1]
    return {**observations, c.ACTION_MASK: torch.where(none, torch.ones_like(mask), mask)}


def all_seen(columns: Columns) -> dict[str, Any]:
    """Return all observations, including a privileged critic's."""
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
    """Positions of a sample's S sequences in its rows."""

    rows: Tensor  # [S]
    starts: Tensor  # [S] first step
    lengths: Tensor  # [S] steps; 0 or less: the sequence is empty
    offsets: Tensor  # [S] steps of the same episode before the sequence

    @classmethod
    def of(cls, columns: Columns) -> Sequences:
        """Make one sequence per segment, or per row without live steps."""
        rows = columns[c.SEGMENT_ROWS]  # [S]
        if len(rows):
            starts, lengths = columns[c.SEGMENT_STARTS], columns[c.SEGMENT_LENGTHS]  # [S]
            return cls(rows, starts, lengths, columns[c.SEGMENT_OFFSETS])
        n, t = columns[c.LIVE].shape
        rows = torch.arange(n, device=rows.device)  # [S = N]
        return cls(rows, torch.zeros_like(rows), torch.full_like(rows, t), torch.zeros_like(rows))

    def longest(self) -> int:
        """Return the longest sequence's length. The host waits for the device."""
        return int(self.lengths.max())

    def observed(self, columns: Columns, length: int) -> Tensor:
        """Index each sequence's input in `all_observations` -> [S, length], int64.

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
        """Index each step in the padded sequences, int64 [N, T]; -1: none.

        Args:
            columns: the sample.
            length: length of the padded sequences; the result indexes [S, length], flattened.
        """
        n, t = columns[c.LIVE].shape
        steps = torch.arange(length, device=self.rows.device)  # [length]
        within = (self.rows * t + self.starts).unsqueeze(1) + steps  # [S, length]
        nowhere = n * t
        targets = torch.where(steps < self.lengths.unsqueeze(1), within, nowhere)  # [S, length]
        places = self.rows.new_full((n * t + 1,), -1)
        places[targets.flatten()] = torch.arange(targets.numel(), device=places.device)
        return places[:nowhere].view(n, t)  # [N, T]


#: The number of truncated episodes is rounded up to a multiple of this share of the sample's steps.
_SHARE: Final = 1 / 64


def with_recurring_shapes(columns: Columns) -> Columns:
    """Give a stateless module's columns shapes that repeat between samples.

    Segments are omitted, because only modules with a state read them. The number of truncated
    episodes is rounded up, which adds at most one observation per 64 steps of the sample. Zero
    stays zero.
    """
    columns = without_segments(columns)
    if c.FINAL_ROWS not in columns:
        return columns
    n, t = columns[c.LIVE].shape
    multiple = max(1, int(n * t * _SHARE))
    return padded_truncations(columns, -(-len(columns[c.FINAL_ROWS]) // multiple) * multiple)


def without_segments(columns: Columns) -> Columns:
    return {name: column for name, column in columns.items() if name not in c.SEGMENTS}


def padded_truncations(columns: Columns, count: int) -> Columns:
    """Pad columns to `count` truncated episodes by repeating the last one.

    A loss may read the value of a final observation, but must not have a gradient through it:
    repeated observations would count several times.

    Args:
        columns: columns with at most `count` truncated episodes.
        count: K.
    """
    missing = count - len(columns[c.FINAL_ROWS])
    if not missing:
        return columns
    finals = [name for name in c.FINALS if name in columns]
    last: dict[str, Any]
    if len(columns[c.FINAL_ROWS]):
        last = {name: tree_map(lambda x: x[-1:], columns[name]) for name in finals}  # [1, ...]
    else:
        # The same observation already follows a row's last step, unless that is truncated.
        steps = columns[c.LIVE].shape[1]
        last = {
            c.FINAL_ROWS: torch.zeros_like(columns[c.LIVE][:1, 0], dtype=torch.int64),  # [1]
            c.FINAL_STEPS: torch.full_like(columns[c.LIVE][:1, 0], steps - 1, dtype=torch.int64),
        }
        for _, after, final in (c.OBSERVED, c.OBSERVED_BY_CRITIC):
            if final in columns:
                last[final] = tree_map(lambda x: x[:1], columns[after])
    padded = {
        name: tree_map(
            lambda x, y: torch.cat([x, y.expand(missing, *y.shape[1:])]), columns[name], last[name]
        )
        for name in finals
    }  # [K, ...] each
    return {**columns, **padded}


class Unrolled(NamedTuple):
    """Outputs of a stateful module for S sequences, and their steps."""

    outputs: dict[str, Any]  # [S, L + 1, ...]
    #: [N, T] int64, index of each step's observation in [S, L + 1], flattened. The next entry is
    #: the observation after the step. Arbitrary for steps that are not learned from.
    places: Tensor
    live: Tensor  # [N, T] bool: the steps to learn from


def unrolled(forward: Forward, columns: Columns, burn_in: int = 0) -> Unrolled:
    """Run a stateful module over all segments of a sample.

    A segment starts from the initial state or, if it continues an earlier batch's episode, from the
    state that came with the row.

    Args:
        forward: the module's training pass.
        columns: the sample.
        burn_in: steps at the start of a continued segment that only compute a state for the current
            parameters, without gradients or learning (Kapturowski et al. 2019, "Recurrent
            Experience Replay in Distributed Reinforcement Learning", section 3).

    Raises:
        ValueError: the episodes have no state.
    """
    if c.MODULE_STATE not in columns[c.STATES]:
        raise ValueError(
            f"{type(forward.module).__name__} has a state, and the episodes have none: they were "
            "sampled with another module"
        )
    observations = all_seen(columns)  # [N T + N + K, ...] each
    sequences = Sequences.of(columns)
    continued = sequences.offsets > 0  # [S]
    stored = tree_map(lambda x: x[sequences.rows], columns[c.STATES][c.MODULE_STATE])  # [S, ...]
    begins = ~continued  # [S]
    initial = tree_map(lambda x: x.to(begins.device), forward.initial_state())  # [...]
    states = restarted(stored, initial, begins)  # [S, ...]
    if burn_in:
        with torch.no_grad():
            outputs = forward(_batch(observations, sequences.observed(columns, burn_in), states))
        # Segments that begin an episode keep the initial state.
        states = restarted(outputs[c.STATES], states, begins)  # [S, ...]
        skipped, (rows, starts, lengths, offsets) = continued * burn_in, sequences  # [S] each
        sequences = Sequences(rows, starts + skipped, lengths - skipped, offsets + skipped)
    index = sequences.observed(columns, max(sequences.longest(), 1) + 1)  # [S, L + 1]
    outputs = forward(_batch(observations, index, states))
    places = sequences.places(columns, index.shape[1])  # [N, T]
    live = columns[c.LIVE] & (places >= 0)  # [N, T]
    # Steps that are not learned from may have any valid place.
    return Unrolled(outputs, places.clamp(min=0), live)


def _batch(observations: dict[str, Any], index: Tensor, states: Any) -> Batch:
    """Make a stateful module's batch: sequences [S, L, ...], with states."""
    return {**tree_map(lambda x: x[index], observations), c.STATES: states}
