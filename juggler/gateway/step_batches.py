"""Reads and checks batches of steps, and writes the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.gateway.agents import module_of
from juggler.gateway.session_errors import Code, SessionError
from juggler.gateway.sessions import (
    AgentInterface,
    AgentSteps,
    GatewaySession,
    SessionAgent,
    StepMessage,
)
from juggler.runtime.episodes.batch import MOST_REWARD, TOO_LARGE
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.structures import put, take
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import simulator_pb2 as pb


@dataclass(slots=True, eq=False)
class PlayerRows:
    """The rows of an agent that belong to one player."""

    steps: AgentSteps
    player: str
    rows: list[int] | None  # [S] indices of its rows; None: all rows, in order
    slots: NDArray[np.intp]  # [S] their places in the player
    rewards: list[float]  # [S] of the last actions
    # Places, and their rewards from before the first action of an episode.
    early: list[tuple[int, float]]
    finals: Any  # last observations [K, ...] of the K truncated rows
    terminated: list[int]  # indices among the S rows where the episode ended
    truncated: list[int]  # indices where it was cut off
    paused: list[int]  # indices where the player does not act next
    acting: NDArray[np.intp] = field(init=False)  # places where the player acts next

    def __post_init__(self) -> None:
        self.acting = np.delete(self.slots, self.paused) if self.paused else self.slots
        self.steps.due += 1

    def answer(self, actions: list[bytes], version: Version) -> None:
        """Set the actions of its acting rows."""
        steps = self.steps
        steps.due -= 1
        if len(self.acting) or not (steps.due or steps.acted):
            steps.acted.append((self.player, version))
        if self.rows is None and not self.paused:
            steps.actions = actions
            return
        # Several players act for these rows, or some need no action.
        sizes = [leaf.row_bytes for leaf in steps.agent.interface.actions.leaves]
        if not steps.actions:
            steps.actions = [np.zeros((steps.rows, size), np.uint8) for size in sizes]
        rows = np.delete(np.arange(steps.rows) if self.rows is None else self.rows, self.paused)
        for whole, size, own in zip(steps.actions, sizes, actions, strict=False):
            whole[rows] = np.frombuffer(own, np.uint8).reshape(len(rows), size)


def read_steps(session: GatewaySession, message: pb.StepBatch) -> StepMessage:
    """Read and check a batch of steps.

    Raises:
        SessionError: the batch is not valid.
    """
    batch = StepMessage(session, message.seq)
    try:
        check_agents(session, message.agents, "rows")
        for rows in message.agents:
            agent = session.agents[rows.agent]
            try:
                batch.parts.append(_read_rows(session, agent, batch, rows))
            except SessionError as error:
                raise agent.named_in(error) from error
        # With several agents, an episode ends with the last of them.
        if session.episodes is not None:
            continuing = environments_of(session, message.continuing)
            batch.over, batch.began = session.episodes.follow(batch.parts, continuing)
            batch.idle = dict(message.idle_rewards)
            named = environments_of(session, [*batch.idle])
            check_rewards([*batch.idle.values()], lambda at: f"environment {named[at]}")
        else:
            batch.over = [part.environments[at] for part in batch.parts for at in part.ended]
    except SessionError as error:
        error.seq = message.seq
        raise
    return batch


def check_rewards(rewards: Sequence[float], whose: Callable[[int], str]) -> None:
    """Check that rewards are small enough for a learner to square returns.

    Args:
        whose: returns the origin of a reward for messages, by its index.

    Raises:
        SessionError: a reward is too large, or no number.
    """
    if sum(map(abs, rewards)) <= MOST_REWARD:  # false with a NaN
        return
    for at, each in enumerate(rewards):
        if not abs(each) <= MOST_REWARD:
            rule = "rewards must be finite numbers"
            if math.isfinite(each):
                rule = TOO_LARGE
            raise SessionError(Code.NOT_FINITE, f"the reward of {whose(at)} is {each:g}: {rule}")


def read_infos(
    given: Sequence[float], count: int, names: int, what: str
) -> NDArray[np.float64] | None:
    """Return numbers [count, K] of rows or steps; None: no numbers.

    Args:
        count: number of rows or steps.
        names: K, number of `info_names` of the hello.

    Raises:
        SessionError: the number of numbers is wrong.
    """
    if not given:
        return None
    if len(given) != count * names:
        text = f"{len(given)} infos for {count} {what}, and the hello has {names} info_names"
        rule = "send one number for each name in each of them, NaN where there is none"
        raise SessionError(Code.WRONG_SHAPE, f"{text}: {rule}")
    return np.array(given, np.float64).reshape(count, names)


def check_agents(
    session: GatewaySession, parts: Sequence[pb.Rows | pb.Recording], what: str
) -> None:
    """Check that a session has these agents, each at most once.

    Args:
        what: name of the parts in error messages.
    """
    known = len(session.agents)
    given = [rows.agent for rows in parts[: known + 1]]  # more are always wrong
    if given and max(given) < known and len(set(given)) == len(given):
        return
    has = "agent 0 alone" if known == 1 else f"the agents 0 to {known - 1}"
    whose = f"agent {given[0]}" if len(given) == 1 else f"the agents {given[:20]}"
    rule = "; name each at most once" if len(given) > 1 else ""
    text = f"{what} of {whose}: this session has {has}{rule}"
    raise SessionError(Code.UNKNOWN_AGENT, text)


def _read_rows(
    session: GatewaySession, agent: SessionAgent, batch: StepMessage, rows: pb.Rows
) -> AgentSteps:
    layout = agent.interface.observations
    given = environments_of(session, rows.environments)
    environments = _environments(agent, given)
    count = len(environments)
    _must_have(len(rows.rewards) or count, count, "rewards")
    # Columns may be left out if they are all zero.
    rewards = list(rows.rewards) or [0.0] * count
    terminated = _flagged(rows.terminated, count, "terminated")
    truncated = _flagged(rows.truncated, count, "truncated")
    paused = _flagged(rows.paused, count, "paused")
    if terminated or truncated or paused:
        before = set(terminated)
        truncated = [at for at in truncated if at not in before]
        _check_ends(agent, environments, [*terminated, *truncated], paused)
    # The order decides which fault of several a simulator reads about.
    check_rewards(rewards, lambda row: agent.at(environments[row]))
    early = _early(rows, count, agent, environments) if rows.early_rewards else []
    raw = layout.raw(rows.observations, count, "observations")
    return AgentSteps(
        agent,
        batch,
        environments,
        rewards,
        # Only books of several agents, and of infos, need these.
        [at for at, each in enumerate(environments) if agent.acted[each]]
        if session.episodes is not None or session.infos is not None
        else [],
        terminated,
        truncated,
        paused,
        raw,
        _finals(rows, agent, environments, truncated),
        read_infos(rows.infos, count, len(session.hello.info_names), "rows"),
        early,
    )


def _early(
    rows: pb.Rows, count: int, agent: SessionAgent, environments: list[int]
) -> list[tuple[int, float]]:
    """Return rewards from before the first action in an episode, by row."""
    given = list(rows.early_rewards)
    _must_have(len(given), count, "early rewards")
    check_rewards(given, lambda row: agent.at(environments[row]))
    places = (at for at, each in enumerate(environments) if not agent.acted[each])
    return [(at, given[at]) for at in places if given[at]]


def read_observations(
    interface: AgentInterface, arrivals: Sequence[AgentSteps]
) -> tuple[Tree, list[tuple[AgentSteps, SessionError]]]:
    """Return observations [B, ...] of all rows, and refused steps."""
    count = sum(steps.rows for steps in arrivals)
    shown = interface.observations.tree([steps.raw for steps in arrivals], count)  # [B, ...]
    begin = 0
    for steps in arrivals:
        steps.begin, begin = begin, begin + steps.rows
        if steps.paused:
            put(shown, np.add(steps.paused, steps.begin), interface.nothing)
    # A bad row is replaced, so that it does not delay other simulators.
    refused: list[tuple[AgentSteps, SessionError]] = []
    while found := interface.first_bad(shown):
        row, error = found
        steps = next(each for each in arrivals if row < each.begin + each.rows)
        error.seq = steps.batch.seq
        environment = steps.environments[row - steps.begin]
        refused.append((steps, _located(error, steps.agent, environment)))
        put(shown, slice(steps.begin, steps.begin + steps.rows), interface.nothing)
    return shown, refused


def _located(error: SessionError, agent: SessionAgent, environment: int) -> SessionError:
    return SessionError(error.code, f"{agent.at(environment)}: {error}", error.seq, error.retryable)


def whole(part: AgentSteps, player: str) -> PlayerRows:
    """Give all rows of an agent to one player."""
    seats = part.agent.seats[player]
    slots = seats if part.environments is part.agent.everyone else seats[part.environments]
    early = [(int(slots[row]), reward) for row, reward in part.early]
    columns = part.rewards, early, part.finals, part.terminated, part.truncated, part.paused
    return PlayerRows(part, player, None, slots, *columns)


def split(part: AgentSteps, before: Sequence[str], after: Sequence[str]) -> list[PlayerRows]:
    """Split the rows of an agent among players.

    The result of the last action belongs to the player that acted. The observation to act on
    belongs to the player of the new episode.

    Args:
        before: [R] players of the last actions.
        after: [R] players that act next.
    """
    ended, paused, terminated = set(part.ended), set(part.paused), set(part.terminated)
    taken: dict[str, list[int]] = {}  # rows by player
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        if row in ended or row in paused:
            taken.setdefault(old, []).append(row)
        if row not in paused and not (row in ended and new == old):
            taken.setdefault(new, []).append(row)
    if len(taken) == 1:
        return [whole(part, *taken)]
    # Each player's rows have indices of their own.
    early = dict(part.early)
    final_of = {row: place for place, row in enumerate(part.truncated)}
    shares: list[PlayerRows] = []
    for player, rows in taken.items():
        slots = part.agent.seats[player][[part.environments[row] for row in rows]]
        over = [(at, row) for at, row in enumerate(rows) if row in ended and before[row] == player]
        # Of the rows that end, only truncated ones have a last observation.
        truncated = [(at, final_of[row]) for at, row in over if row not in terminated]
        share = PlayerRows(
            part,
            player,
            rows,
            slots,
            [part.rewards[row] for row in rows],
            [(int(slots[at]), early[row]) for at, row in enumerate(rows) if row in early],
            take(part.finals, [place for _, place in truncated]) if truncated else {},
            [at for at, row in over if row in terminated],
            [at for at, _ in truncated],
            [at for at, row in enumerate(rows) if row in paused or after[row] != player],
        )
        shares.append(share)
    return shares


def environments_of(session: GatewaySession, given: Sequence[int]) -> list[int]:
    """Return the environments that a message names."""
    known = session.environments
    named = list(given[: known + 1])  # more are always wrong
    if named and (max(named) >= known or len(set(named)) != len(named)):
        which = f"environment {named[0]}" if len(named) == 1 else f"environments {named[:20]}"
        rule = "; name each at most once" if len(named) > 1 else ""
        text = f"{which}: the hello announced environments from 0 to {known - 1}{rule}"
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
    """Return the indices of set flags [R], which may be left out."""
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
    rows: pb.Rows, agent: SessionAgent, environments: list[int], truncated: list[int]
) -> Tree:
    """Return the last observations [K, ...] of the K truncated rows."""
    count = len(environments)
    places = list(rows.final_rows[: count + 1])  # more are always wrong
    if missing := set(truncated) - set(places):
        text = (
            f"row {min(missing)} was truncated and is not among final_rows: send the last "
            "observation of its episode, from which its return is estimated"
        )
        raise SessionError(Code.NO_FINAL_OBSERVATION, text)
    if not places:
        return {}
    if max(places) >= count or len(set(places)) != len(places):
        text = f"final_rows {places[:20]}: name each of the {count} rows at most once"
        raise SessionError(Code.WRONG_SHAPE, text)
    layout = agent.interface.observations
    raw = layout.raw(rows.final_observations, len(places), "final observations")
    # A last observation after a termination is not used.
    at = {row: place for place, row in enumerate(places)}
    finals: Tree = take(layout.tree([raw], len(places)), [at[row] for row in truncated])
    if found := agent.interface.first_bad(finals, masks=False):
        raise _located(found[1], agent, environments[truncated[found[0]]])
    return finals


def write_actions(steps: AgentSteps, into: pb.ActionBatch) -> None:
    """Add the actions of an agent to a message."""
    ((player, version), *others) = steps.acted
    given = into.agents.add(agent=steps.agent.index)
    # Several policies have no common name and version.
    if not others:
        given.policy = module_of(player)
        given.version.generation, given.version.update = version
    for leaf, data in zip(steps.agent.interface.actions.leaves, steps.actions, strict=True):
        shape = steps.rows, *leaf.shape
        given.actions.add(path=leaf.path, dtype=leaf.number, shape=shape, data=bytes(data))


def to_message(version: Version) -> pb.PolicyVersion:
    """Convert a policy's version to a message for simulators."""
    return pb.PolicyVersion(generation=version.generation, update=version.update)
