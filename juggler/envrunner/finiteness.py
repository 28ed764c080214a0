"""Numbers that are not finite, found before they leave the runner."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.episodes.batch import EpisodeBatch


class NonFinite(Exception):
    """A batch holds NaN or infinity where something would be learned from it.

    Attributes:
        environment: its index in the runner, which is the row of the batch.
        step: of the fragment.
        column: of the batch: observations, rewards, …; "action_logp" where the policy itself
            broke while it saw nothing but finite observations.
        live_steps: of the batch, all of which are lost.
    """

    def __init__(self, environment: int, step: int, column: str, live_steps: int) -> None:
        super().__init__(environment, step, column, live_steps)
        self.environment = environment
        self.step = step
        self.column = column
        self.live_steps = live_steps

    def __str__(self) -> str:
        whose = (
            "the policy's weights are broken"
            if self.column == "action_logp"
            else "the environment must give finite numbers"
        )
        return (
            f"{self.column} of environment {self.environment} at step {self.step} of a fragment "
            f"are not finite: {whose}"
        )


def check_finite(batch: EpisodeBatch) -> None:
    """Refuse a batch that holds NaN or infinity.

    What belongs to no live step (the observation after the end of an episode, which a simulator
    may have ended because of it) is set to 0 instead, since a masked NaN is still NaN.

    Raises:
        NonFinite: names the first in time.
    """
    columns = (
        batch.observations,
        batch.action_logp,
        batch.rewards,
        batch.final_observations,
        batch.last_observations,
    )
    if all(np.isfinite(column).all() for column in columns if column.dtype.kind == "f"):
        return
    _clear_after_ends(batch)
    found: list[tuple[int, int, int, str]] = []  # step, order within it, row, column
    for order, name in enumerate(("observations", "action_logp", "rewards")):
        rows, steps = np.nonzero(_not_finite(getattr(batch, name), 2))
        if len(rows):
            first = steps.argmin()
            found.append((int(steps[first]), order, int(rows[first]), name))
    for k in np.flatnonzero(_not_finite(batch.final_observations, 1)):
        at = int(batch.final_steps[k]), 3, int(batch.final_rows[k])
        found.append((*at, "final_observations"))
    if (rows := np.flatnonzero(_not_finite(batch.last_observations, 1))).size:
        found.append((batch.steps - 1, 4, int(rows[0]), "last_observations"))
    if found:
        step, _, row, name = min(found)
        raise NonFinite(row, step, name, batch.live_steps)


def _clear_after_ends(batch: EpisodeBatch) -> None:
    dead = ~batch.live  # [N, T]
    for column in (batch.observations, batch.actions, batch.action_logp):
        column[dead & _not_finite(column, 2)] = 0
    over = batch.terminated[:, -1] | batch.truncated[:, -1]  # [N]
    batch.last_observations[over & _not_finite(batch.last_observations, 1)] = 0


def _not_finite(column: NDArray[Any], dimensions: int) -> NDArray[np.bool_]:
    """Which entries, over the leading dimensions, hold something not finite."""
    bad = ~np.isfinite(column)
    flags: NDArray[np.bool_] = bad.any(axis=tuple(range(dimensions, bad.ndim)))
    return flags
