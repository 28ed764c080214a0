"""Finds numbers that are not finite before a batch leaves the EnvRunner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.episodes.batch import (
    MOST_REWARD,
    TOO_LARGE,
    EpisodeBatch,
    all_finite,
    first_not_finite,
    floats,
    not_finite,
)

_MOST_RETURN: Final = float(np.finfo(np.float32).max)  # in messages to the driver


@dataclass(eq=False)
class NonFiniteBatch(Exception):
    """A batch holds a number that is not finite or too large.

    Only live steps count. A reward is too large if a return could become infinite.
    """

    # Its index, which is the row of the batch; with several agents, the environment of the agent.
    environment: int
    step: int  # of the fragment, or of the row
    # Of the batch, such as "rewards" or, in a Dict, "observations/camera". It is "action_logp" if
    # the policy is broken, although all observations are finite.
    column: str
    live_steps: int  # of the batch, all of which are lost
    why: str = ""  # the reason, if known; else ""
    agent: str = ""  # its name, if environments have several; else ""
    value: float | None = None  # the number; None: unknown, as when a connector has clipped it
    episode_step: int | None = None  # of its episode, counted from 0 like `step`; None: unknown

    traceback: ClassVar[str] = ""  # always "", because the message names the place

    def __str__(self) -> str:
        reason = (
            "the policy's weights are broken"
            if self.column == "action_logp"
            else rule_for(self.value)
        )
        number = "not finite" if self.value is None else f"{self.value}"
        whose = f"agent {self.agent!r} in " if self.agent else ""
        step, of = self.episode_step, "its episode"
        if step is None:
            step, of = self.step, "a row" if self.agent else "a fragment"
        # Other columns than the steps' own hold what came after a step.
        column = self.column.removeprefix("last_").removeprefix("final_")
        when = "at" if column == self.column else "after"
        return (
            f"{column} of {whose}environment {self.environment} {when} step {step} of {of} are "
            f"{number}: {reason}" + (f" ({self.why})" if self.why else "")
        )


def rule_for(value: float | None) -> str:
    """Return the rule that a number breaks; None: it is not finite."""
    if value is not None and math.isfinite(value):
        return TOO_LARGE
    too_large = value is not None and math.isinf(value)
    return "the environment must give finite numbers" + ", below 3.4e38 as float32" * too_large


def check_finite(batch: EpisodeBatch) -> None:
    """Refuse a batch with a non-finite or too large number.

    This is NaN or infinity in a live step, or a reward beyond `MOST_REWARD`. In other steps, NaN
    and infinity become 0, because a masked NaN is still NaN: a simulator may have ended an
    episode because of them.

    Raises:
        NonFiniteBatch: names the first in time.
    """
    if not all_finite(batch):
        _clear_after_ends(batch)
        if found := first_not_finite(batch):
            raise _lost(batch, found.row, found.step, found.column, found.value)
    too_large = np.abs(batch.rewards) > MOST_REWARD  # [N, T]
    if too_large.any():
        step, row = (int(each[0]) for each in np.nonzero(too_large.T))
        raise _lost(batch, row, step, "rewards", float(batch.rewards[row, step]))


def _lost(
    batch: EpisodeBatch, row: int, step: int, column: str, value: float | None
) -> NonFiniteBatch:
    """Make the error for a batch that one number spoils."""
    starts = batch.segment_starts  # [S]
    within = (starts <= step) & (step < starts + batch.segment_lengths)  # [S]
    segments = np.flatnonzero((batch.segment_rows == row) & within)
    in_episode = None
    if len(segments):
        segment = int(segments[0])
        in_episode = int(batch.segment_offsets[segment]) + step - int(starts[segment])
    live = batch.live_steps
    return NonFiniteBatch(row, step, column, live, value=value, episode_step=in_episode)


def check_return(environment: int, total: float) -> None:
    """Check the return of an episode.

    Raises:
        EnvironmentFailed: it is NaN, or too large for messages to the driver.
    """
    if abs(total) <= _MOST_RETURN:  # false with a NaN
        return
    reason = f"the return of its episode is {total:g}: {rule_for(total)}"
    raise EnvironmentFailed(f"environment {environment}", "step", reason)


def _clear_after_ends(batch: EpisodeBatch) -> None:
    dead = ~batch.live  # [N, T]
    stepwise = batch.observations, batch.critic_observations, batch.actions, batch.action_logp
    for column in stepwise:
        for _, array in floats("", column):
            array[dead & not_finite(array, 2)] = 0
    over = batch.terminated[:, -1] | batch.truncated[:, -1]  # [N]
    for column in (batch.last_observations, batch.last_critic_observations):
        for _, array in floats("", column):
            array[over & not_finite(array, 1)] = 0
