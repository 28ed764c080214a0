"""Finds numbers that are not finite before a batch leaves the EnvRunner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.trees import Tree, flatten


class NonFinite(Exception):
    """A batch holds NaN or infinity in a live step.

    Attributes:
        environment: its index, which is the row of the batch; with several agents, the
            environment of the agent.
        step: of the fragment, or of the row.
        column: of the batch, such as "rewards" or, in a Dict, "observations/camera". It is
            "action_logp" if the policy is broken, although all observations are finite.
        live_steps: of the batch, all of which are lost.
        why: the reason, if known; else "".
        agent: its name, where environments have several; else "".
        value: the number; None: it is not known, as where a connector has clipped it.
        traceback: always "", since the message names the place.
    """

    traceback = ""

    def __init__(
        self,
        environment: int,
        step: int,
        column: str,
        live_steps: int,
        why: str = "",
        agent: str = "",
        value: float | None = None,
    ) -> None:
        super().__init__(environment, step, column, live_steps, why, agent, value)
        self.environment = environment
        self.step = step
        self.column = column
        self.live_steps = live_steps
        self.why = why
        self.agent = agent
        self.value = value

    def __str__(self) -> str:
        reason = (
            "the policy's weights are broken"
            if self.column == "action_logp"
            else "the environment must give finite numbers"
        )
        number = "not finite" if self.value is None else f"{self.value}"
        whose = f"agent {self.agent!r} in " if self.agent else ""
        return (
            f"{self.column} of {whose}environment {self.environment} at step {self.step} of a "
            f"{'row' if self.agent else 'fragment'} are {number}: {reason}"
            + (f" ({self.why})" if self.why else "")
        )


def check_finite(batch: EpisodeBatch) -> None:
    """Refuse a batch that holds NaN or infinity in a live step.

    In other steps, such numbers are set to 0, since a masked NaN is still NaN. A simulator may
    have ended an episode because of them.

    Raises:
        NonFinite: names the first in time.
    """
    columns = (
        batch.observations,
        batch.action_logp,
        batch.rewards,
        batch.final_observations,
        batch.last_observations,
        batch.critic_observations,
        batch.final_critic_observations,
        batch.last_critic_observations,
    )
    if all(np.isfinite(array).all() for column in columns for _, array in _floats("", column)):
        return
    _clear_after_ends(batch)
    # Step, order within it, row, column, number
    found: list[tuple[int, int, int, str, float]] = []
    columns_of_steps = ("observations", "critic_observations", "action_logp", "rewards")
    for order, column in enumerate(columns_of_steps):
        for name, array in _floats(column, getattr(batch, column)):
            rows, steps = np.nonzero(_not_finite(array, 2))
            if len(rows):
                first = steps.argmin()
                step, row = int(steps[first]), int(rows[first])
                found.append((step, order, row, name, _first_in(array[row, step])))
    for column in ("final_observations", "final_critic_observations"):
        for name, array in _floats(column, getattr(batch, column)):
            found += [
                (
                    int(batch.final_steps[k]),
                    4,
                    int(batch.final_rows[k]),
                    name,
                    _first_in(array[k]),
                )
                for k in np.flatnonzero(_not_finite(array, 1))
            ]
    for column in ("last_observations", "last_critic_observations"):
        for name, array in _floats(column, getattr(batch, column)):
            if (rows := np.flatnonzero(_not_finite(array, 1))).size:
                row = int(rows[0])
                found.append((batch.steps - 1, 5, row, name, _first_in(array[row])))
    if found:
        step, _, row, name, value = min(found)
        raise NonFinite(row, step, name, batch.live_steps, value=value)


def _first_in(array: NDArray[Any]) -> float:
    """The first number that is not finite in an array [...] that has one."""
    numbers = np.asarray(array)
    return float(numbers[~np.isfinite(numbers)][0])


def _clear_after_ends(batch: EpisodeBatch) -> None:
    dead = ~batch.live  # [N, T]
    stepwise = batch.observations, batch.critic_observations, batch.actions, batch.action_logp
    for column in stepwise:
        for _, array in _floats("", column):
            array[dead & _not_finite(array, 2)] = 0
    over = batch.terminated[:, -1] | batch.truncated[:, -1]  # [N]
    for column in (batch.last_observations, batch.last_critic_observations):
        for _, array in _floats("", column):
            array[over & _not_finite(array, 1)] = 0


def _floats(name: str, column: Tree) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the floating-point arrays of a column with their names."""
    for path, array in flatten(column):
        if array.dtype.kind == "f":
            yield "/".join((name, *path)), array


def _not_finite(array: NDArray[Any], dimensions: int) -> NDArray[np.bool_]:
    """Tell which entries, by the leading dimensions, hold a number that is not finite."""
    bad = ~np.isfinite(array)
    flags: NDArray[np.bool_] = bad.any(axis=tuple(range(dimensions, bad.ndim)))
    return flags
