"""A simulator's batches of steps, read and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.gateway.answers import Part
from juggler.gateway.row_layout import Layout, check_rewards, read_infos
from juggler.gateway.sessions import Code, Session, SessionAgent, SessionError
from juggler.runtime.wire.v1 import simulator_pb2 as pb


@dataclass(slots=True, eq=False)
class Steps:
    """R rows of one agent of a session, mostly as lists: the rows of many sessions become arrays
    together.

    Attributes:
        session: of the simulator.
        agent: of the session.
        batch: that they came in.
        environments: [R] their numbers in the session.
        slots: [R] their places in the player of the agent's module.
        rewards: [R]
        rewarded: places among the R rows whose rewards are those of an action, if the session
            counts episodes or tells infos.
        terminated: places where the episode ended.
        truncated: places where the episode was cut off.
        paused: places that want no action.
        raw: the bytes of each leaf of the observations.
        final_raw: the bytes of each leaf of the final observations.
        final_rows: their places.
        infos: [R, K] numbers that the simulator tells of the last step; None: it tells none.
        final_observations: [K, ...] of the K truncated rows, as batches hold them; set by the
            player.
        begin: where its rows begin in `observations`.
        observations: a tree [B, ...] of all rows of a turn; set by the player.
        acting: places in the player of the rows that want an action; set by the player.
        rows: R.
    """

    session: Session
    agent: SessionAgent
    batch: Batch
    environments: list[int]
    slots: NDArray[np.intp]
    rewards: list[float]
    rewarded: list[int]
    terminated: list[int]
    truncated: list[int]
    paused: list[int]
    raw: list[bytes]
    final_raw: list[bytes]
    final_rows: list[int]
    infos: NDArray[np.float64] | None
    final_observations: Any = None
    begin: int = 0
    observations: Any = None
    acting: NDArray[np.intp] = field(init=False)
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.acting, self.rows = self.slots, len(self.environments)

    @property
    def seq(self) -> int:
        return self.batch.seq

    @property
    def index(self) -> int:
        """Of the agent."""
        return self.agent.index

    @property
    def ended(self) -> list[int]:
        """Places among the R rows where the episode ended or was cut off."""
        return [*self.terminated, *self.truncated]


@dataclass(slots=True, eq=False)
class Batch:
    """What one message says of a session's agents.

    Attributes:
        session: of the simulator.
        seq: of the message.
        parts: of different agents.
        over: the environments whose episodes are over with it, if the session counts them or tells
            infos.
        answers: the actions of each part, by the index of its agent.
        arrived: seconds of `time.perf_counter`.
    """

    session: Session
    seq: int
    parts: list[Steps] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    answers: dict[int, Part] = field(default_factory=dict)
    arrived: float = field(default_factory=time.perf_counter)


def read_steps(
    session: Session, message: pb.StepBatch, layout_of: Callable[[SessionAgent], Layout]
) -> Batch:
    """Read and check a batch of steps.

    Args:
        session: that it came from.
        message: from the network.
        layout_of: of what an agent observes.

    Raises:
        SessionError: its session may not send that.
    """
    batch = Batch(session, message.seq)
    try:
        _check_agents(session, message.agents)
        for rows in message.agents:
            agent = session.agents[rows.agent]
            batch.parts.append(_read_rows(session, agent, batch, rows, layout_of(agent)))
        if session.episodes is not None:
            continuing = _environments_of(session, message.continuing)
            batch.over, early = session.episodes.follow(batch.parts, continuing)
            if early is not None:
                raise SessionError(
                    Code.OUT_OF_ORDER,
                    f"{session.agents[early[0]].at(early[1])} acts, and has ended in this episode: "
                    "pause it until all agents that act there have ended",
                )
        elif session.infos is not None:
            batch.over = [part.environments[at] for part in batch.parts for at in part.ended]
    except SessionError as error:
        error.seq = message.seq
        raise
    return batch


def _check_agents(session: Session, parts: Sequence[pb.Rows]) -> None:
    known = len(session.agents)
    given = [rows.agent for rows in parts[: known + 1]]  # more are wrong, however many
    if given and max(given) < known and len(set(given)) == len(given):
        return
    has = "agent 0 alone" if known == 1 else f"the agents 0 to {known - 1}"
    text = f"rows of the agents {given[:20]}: this session has {has}; name each at most once"
    raise SessionError(Code.UNKNOWN_AGENT, text)


def _read_rows(
    session: Session, agent: SessionAgent, batch: Batch, rows: pb.Rows, layout: Layout
) -> Steps:
    given = _environments_of(session, rows.environments)
    environments = _environments(agent, given)
    count = len(environments)
    _must_have(len(rows.rewards) or count, count, "rewards")
    rewards = list(rows.rewards) or [0.0] * count
    terminated = _flagged(rows.terminated, count, "terminated")
    truncated = _flagged(rows.truncated, count, "truncated")
    paused = _flagged(rows.paused, count, "paused")
    if terminated or truncated or paused:
        before = set(terminated)
        truncated = [at for at in truncated if at not in before]
        _check_ends(agent, environments, [*terminated, *truncated], paused)
    check_rewards(rewards, lambda row: agent.at(environments[row]))
    raw = layout.raw(rows.observations, count, "observations")
    final_raw, final_rows = _finals(rows, count, truncated, layout)
    return Steps(
        session,
        agent,
        batch,
        environments,
        agent.places[given] if given else agent.places,
        rewards,
        [at for at, each in enumerate(environments) if agent.acted[each]]
        if session.episodes is not None or session.infos is not None
        else [],
        terminated,
        truncated,
        paused,
        raw,
        final_raw,
        final_rows,
        read_infos(session, rows.infos, count, "rows"),
    )


def _environments_of(session: Session, given: Sequence[int]) -> list[int]:
    """Return the environments that a message names.

    Raises:
        SessionError: the session has no such environments, or one is named twice.
    """
    known = session.environments
    named = list(given[: known + 1])  # more are wrong, however many
    if named and (max(named) >= known or len(set(named)) != len(named)):
        text = (
            f"environments {named[:20]}: name each at most once, from 0 to {known - 1}, as many "
            "as the hello said"
        )
        raise SessionError(Code.UNKNOWN_ENVIRONMENT, text)
    return named


def _environments(agent: SessionAgent, given: list[int]) -> list[int]:
    environments = given or agent.everyone
    if 1 not in agent.waiting:
        return environments
    for environment in environments:
        if agent.waiting[environment]:
            raise SessionError(
                Code.OUT_OF_ORDER,
                f"{agent.at(environment)} has not had its last action yet: wait for the answer to "
                "the batch before",
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
    agent: SessionAgent, environments: list[int], ended: list[int], paused: list[int]
) -> None:
    for at in ended:
        if not agent.acted[environments[at]]:
            text = f"{agent.at(environments[at])} ended an episode before it had an action"
            raise SessionError(Code.OUT_OF_ORDER, text)
    over = set(ended)
    for at in paused:
        if at not in over:
            text = f"{agent.at(environments[at])} is paused where no episode ended: it cannot be"
            raise SessionError(Code.OUT_OF_ORDER, text)


def _finals(
    rows: pb.Rows, count: int, truncated: list[int], layout: Layout
) -> tuple[list[bytes], list[int]]:
    places = rows.final_rows[: count + 1]  # more are wrong, however many
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
