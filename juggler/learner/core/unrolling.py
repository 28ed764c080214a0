"""The training pass of a module with a state over a sample: segment by segment, in order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from juggler.learner.core.forward import Forward
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.sequences import Sequences, all_seen
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.rl_module import Batch
from juggler.runtime.wire.structures import tree_map


class Unrolled(NamedTuple):
    """What a module with a state returns for S sequences, and which steps of a sample they are."""

    outputs: dict[str, Any]  # [S, L + 1, ...]
    #: [N, T] int64, where a step's own observation is in [S, L + 1], flattened. The one after the
    #: step is the next there. Of steps that are not learned from, any place.
    places: Tensor
    live: Tensor  # [N, T] bool: the steps to learn from


def unrolled(forward: Forward, columns: Columns, burn_in: int = 0) -> Unrolled:
    """The outputs of a module with a state for all steps of a sample, and what follows them.

    Each segment is read in order. It begins with the initial state or, if it continues an episode
    of an earlier batch, with the state that came with the row.

    Args:
        forward: the module's training pass.
        columns: the sample.
        burn_in: steps at the start of every segment that continues an episode. In these, the module
            only computes a state that fits its present parameters, without gradients; they are not
            among the steps to learn from (Kapturowski et al. 2019, "Recurrent Experience Replay in
            Distributed Reinforcement Learning", section 3).

    Raises:
        ValueError: the episodes lack a state.
    """
    if c.MODULE_STATE not in columns[c.STATES]:
        raise ValueError(
            f"{type(forward.module).__name__} has a state, and the episodes have none: they were "
            "sampled with another module"
        )
    observations = all_seen(columns)  # [N T + N + K, ...] each
    sequences = Sequences.of(columns)
    goes_on = sequences.offsets > 0  # [S]
    stored = tree_map(lambda x: x[sequences.rows], columns[c.STATES][c.MODULE_STATE])  # [S, ...]
    states = _where(goes_on, stored, forward.initial_state())  # [S, ...]
    if burn_in:
        with torch.no_grad():
            outputs = forward(_batch(observations, sequences.observed(columns, burn_in), states))
        # Segments that begin an episode keep the initial state.
        states = _where(goes_on, outputs[c.STATES], states)  # [S, ...]
        sequences = sequences.without_first(goes_on * burn_in)
    index = sequences.observed(columns, max(sequences.longest(), 1) + 1)  # [S, L + 1]
    outputs = forward(_batch(observations, index, states))
    places = sequences.places(columns, index.shape[1])  # [N, T]
    live = columns[c.LIVE] & (places >= 0)  # [N, T]
    # Steps that are not learned from need any outputs that are valid.
    return Unrolled(outputs, places.clamp(min=0), live)


def _where(condition: Tensor, one: Any, other: Any) -> Any:
    """By condition [S], entries of one tree [S, ...] or of another, which may lack [S]."""
    return tree_map(
        lambda x, y: torch.where(condition.view(-1, *[1] * (x.ndim - 1)), x, y.to(x.device)),
        one,
        other,
    )


def _batch(observations: dict[str, Any], index: Tensor, states: Any) -> Batch:
    """The batch for a module with a state: observations as sequences [S, L, ...], and states."""
    return {**tree_map(lambda x: x[index], observations), c.STATES: states}
