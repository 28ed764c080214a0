"""A simulator's batch of steps, read and checked."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.gateway.row_layout import Layout
from juggler.gateway.sessions import Code, Session, SessionError
from juggler.runtime.wire.v1 import simulator_pb2 as pb


@dataclass(slots=True, eq=False)
class Steps:
    """R rows of one session, mostly as lists: the rows of many sessions become arrays together.

    Attributes:
        session: of the simulator.
        seq: of the batch.
        environments: [R] their numbers in the session.
        slots: [R] their places in the gateway.
        rewards: [R]
        terminated: places among the R rows where the episode ended.
        truncated: places where the episode was cut off.
        paused: places that want no action.
        raw: the bytes of each leaf of the observations.
        final_raw: the bytes of each leaf of the final observations.
        final_rows: their places.
        final_observations: [K, ...] of the K truncated rows, as batches hold them; set by the
            player.
        begin: where its rows begin in `observations`.
        observations: a tree [B, ...] of all rows of a turn; set by the player.
        acting: places in the gateway of the rows that want an action; set by the player.
        rows: R.
        arrived: seconds of `time.perf_counter`.
    """

    session: Session
    seq: int
    environments: list[int]
    slots: NDArray[np.intp]
    rewards: list[float]
    terminated: list[int]
    truncated: list[int]
    paused: list[int]
    raw: list[bytes]
    final_raw: list[bytes]
    final_rows: list[int]
    final_observations: Any = None
    begin: int = 0
    observations: Any = None
    acting: NDArray[np.intp] = field(init=False)
    rows: int = field(init=False)
    arrived: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.acting, self.rows = self.slots, len(self.environments)


def read_steps(session: Session, batch: pb.StepBatch, layout: Layout) -> Steps:
    """Read and check a batch of steps.

    Raises:
        SessionError: its session may not send that.
    """
    if len(batch.agents) != 1 or batch.agents[0].agent != 0:
        agents = [rows.agent for rows in batch.agents]
        text = f"rows of the agents {agents}: this session has agent 0 alone"
        raise SessionError(Code.UNKNOWN_AGENT, text, batch.seq)
    rows = batch.agents[0]
    try:
        given = list(rows.environments)
        environments = _environments(session, given)
        count = len(environments)
        rewards = list(rows.rewards) or [0.0] * count
        _must_have(len(rewards), count, "rewards")
        terminated = _flagged(rows.terminated, count, "terminated")
        truncated = _flagged(rows.truncated, count, "truncated")
        paused = _flagged(rows.paused, count, "paused")
        if terminated or truncated or paused:
            truncated = [at for at in truncated if at not in set(terminated)]
            _check_ends(session, environments, [*terminated, *truncated], paused)
        if not math.isfinite(sum(rewards)):
            bad = next((i for i, each in enumerate(rewards) if not math.isfinite(each)), 0)
            raise SessionError(
                Code.NOT_FINITE,
                f"the reward of environment {environments[bad]} is {rewards[bad]}: rewards must "
                "be finite numbers",
            )
        raw = layout.raw(rows.observations, count, "observations")
        final_raw, final_rows = _finals(rows, count, truncated, layout)
    except SessionError as error:
        error.seq = batch.seq
        raise
    return Steps(
        session,
        batch.seq,
        environments,
        session.places[given] if given else session.places,
        rewards,
        terminated,
        truncated,
        paused,
        raw,
        final_raw,
        final_rows,
    )


def _environments(session: Session, given: list[int]) -> list[int]:
    known = len(session.slots)
    environments = given or session.everyone
    if given and (max(given) >= known or len(set(given)) != len(given)):
        text = (
            f"environments {given[:20]}: name each at most once, from 0 to {known - 1}, as many "
            "as the hello said"
        )
        raise SessionError(Code.UNKNOWN_ENVIRONMENT, text)
    if 1 not in session.waiting:
        return environments
    for environment in environments:
        if session.waiting[environment]:
            raise SessionError(
                Code.OUT_OF_ORDER,
                f"environment {environment} has not had its last action yet: wait for the "
                "answer to the batch before",
            )
    return environments


def _flagged(flags: Any, count: int, name: str) -> list[int]:
    """The places of the set flags among [R]; flags may be left out where none is set."""
    if not flags:
        return []
    _must_have(len(flags), count, name)
    return [at for at, flag in enumerate(flags) if flag]


def _must_have(length: int, count: int, name: str) -> None:
    if length != count:
        raise SessionError(Code.WRONG_SHAPE, f"{length} {name} for {count} rows: send one for each")


def _check_ends(
    session: Session, environments: list[int], ended: list[int], paused: list[int]
) -> None:
    for at in ended:
        if not session.acted[environments[at]]:
            text = f"environment {environments[at]} ended an episode before it had an action"
            raise SessionError(Code.OUT_OF_ORDER, text)
    for at in paused:
        if at not in ended:
            text = f"environment {environments[at]} is paused where no episode ended: it cannot be"
            raise SessionError(Code.OUT_OF_ORDER, text)


def _finals(
    rows: pb.Rows, count: int, truncated: list[int], layout: Layout
) -> tuple[list[bytes], list[int]]:
    places = list(rows.final_rows)
    if lacking := set(truncated) - set(places):
        text = (
            f"row {min(lacking)} was truncated and is not among final_rows: send the last "
            "observation of its episode, from which its return is estimated"
        )
        raise SessionError(Code.NO_FINAL_OBSERVATION, text)
    if not places:
        return [], []
    if max(places) >= count or len(set(places)) != len(places):
        text = f"final_rows {places[:20]}: name each of the {count} rows at most once"
        raise SessionError(Code.WRONG_SHAPE, text)
    return layout.raw(rows.final_observations, len(places), "final observations"), places
