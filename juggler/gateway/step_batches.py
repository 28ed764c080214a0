"""Reads and checks batches of steps, and writes the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.gateway.session_errors import Code, SessionError
from juggler.gateway.sessions import (
    AgentInterface,
    AgentSteps,
    GatewaySession,
    SessionAgent,
    SpaceLayout,
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
    begin: int = 0  # index of its first row in `observations`
    # [B, ...] converted observations of the player's turn; set by the player.
    observations: Any = None
    shown: Any = None  # [B, ...] the same before connectors

    def __post_init__(self) -> None:
        self.acting = np.delete(self.slots, self.paused) if self.paused else self.slots
        self.steps.due += 1

    @property
    def shows(self) -> slice | list[int]:
        """Indices of its acting rows in `observations`."""
        if not self.paused:
            return slice(self.begin, self.begin + len(self.slots))
        out = set(self.paused)
        return [self.begin + at for at in range(len(self.slots)) if at not in out]

    def answer(self, actions: list[bytes], layout: SpaceLayout, version: Version) -> bool:
        """Set actions of its acting rows; return whether all rows have theirs."""
        steps = self.steps
        steps.due -= 1
        if len(self.acting):
            steps.acted.append((self.player, version))
        if self.rows is None and not self.paused:
            steps.actions = actions
            return True
        # Several players act for these rows, so their bytes are merged.
        if not steps.actions:
            steps.actions = [bytearray(steps.rows * leaf.row_bytes) for leaf in layout.leaves]
        out = set(self.paused)
        rows = range(steps.rows) if self.rows is None else self.rows
        for place, row in enumerate(row for at, row in enumerate(rows) if at not in out):
            for whole, own, leaf in zip(steps.actions, actions, layout.leaves, strict=True):
                size = leaf.row_bytes
                whole[row * size : (row + 1) * size] = own[place * size : (place + 1) * size]
        return not steps.due


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
    final_raw, final_rows = _finals(rows, count, truncated, layout)
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
        final_raw,
        final_rows,
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
        refused.append((steps, _located(error, steps, row - steps.begin)))
        put(shown, slice(steps.begin, steps.begin + steps.rows), interface.nothing)
    for steps in arrivals:
        if steps.truncated:
            finals = interface.observations.tree([steps.final_raw], len(steps.final_rows))
            places = {row: place for place, row in enumerate(steps.final_rows)}
            steps.finals = take(finals, [places[row] for row in steps.truncated])  # [K, ...]
            if found := interface.first_bad(steps.finals, masks=False):
                refused.append((steps, _located(found[1], steps, steps.truncated[found[0]])))
    return shown, refused


def _located(error: SessionError, steps: AgentSteps, at: int) -> SessionError:
    text = f"{steps.agent.at(steps.environments[at])}: {error}"
    return SessionError(error.code, text, steps.batch.seq, error.retryable)


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
    ended, paused = set(part.ended), set(part.paused)
    taken: dict[str, list[tuple[int, bool, bool]]] = {}  # by player: row, ends, acts next
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        ends, acts = row in ended, row not in paused
        if ends and acts and old != new:
            taken.setdefault(old, []).append((row, True, False))
            taken.setdefault(new, []).append((row, False, True))
        else:
            taken.setdefault(new if acts else old, []).append((row, ends, acts))
    if len(taken) == 1:
        return [whole(part, *taken)]
    # Each player's rows have indices of their own.
    terminated, early = set(part.terminated), dict(part.early)
    final_of = {row: place for place, row in enumerate(part.truncated)}
    shares: list[PlayerRows] = []
    for player, taken_rows in taken.items():
        rows = [row for row, _, _ in taken_rows]
        slots = part.agent.seats[player][[part.environments[row] for row in rows]]
        over = [(at, row) for at, (row, ends, _) in enumerate(taken_rows) if ends]
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
            [at for at, (_, _, acts) in enumerate(taken_rows) if not acts],
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
    rows: pb.Rows, count: int, truncated: list[int], layout: SpaceLayout
) -> tuple[list[bytes], list[int]]:
    places = rows.final_rows[: count + 1]  # more are always wrong
    if missing := set(truncated) - set(places):
        text = (
            f"row {min(missing)} was truncated and is not among final_rows: send the last "
            "observation of its episode, from which its return is estimated"
        )
        raise SessionError(Code.NO_FINAL_OBSERVATION, text)
    if not places:
        return [], []
    if max(places) >= count or len(set(places)) != len(places):
        text = f"final_rows {places[:20]}: name each of the {count} rows at most once"
        raise SessionError(Code.WRONG_SHAPE, text)
    return layout.raw(rows.final_observations, len(places), "final observations"), places


#: Fields and wire types of simulator.proto.
_TO_SIMULATOR_ACTIONS = b"\x12"
_BATCH_SEQ, _BATCH_AGENTS = b"\x08", b"\x12"
_ACTIONS_ACTIONS = b"\x22"
_TENSOR_DATA = b"\x22"
_SINGLE_BYTES = [bytes([number]) for number in range(128)]


def write_varint(number: int) -> bytes:
    """Encode a non-negative number, as protobuf does."""
    if number < 128:
        return _SINGLE_BYTES[number]
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def action_batch(seq: int, parts: Sequence[bytes], more: bytes) -> bytes:
    """Write a ToSimulator with an ActionBatch.

    Args:
        parts: parts of its agents, as `Answers.part` writes them.
        more: serialized further fields of the ActionBatch.
    """
    content = b"".join([_BATCH_SEQ, write_varint(seq), *parts, more])
    return b"".join([_TO_SIMULATOR_ACTIONS, write_varint(len(content)), content])


class Answers:
    """Writes the actions of a policy."""

    def __init__(self, layout: SpaceLayout, policy: str) -> None:
        self._leaves, self._policy = layout.leaves, policy
        self._version: Version | None = None
        # Bytes before each leaf, by agent and number of rows, for this version.
        self._beginnings: dict[tuple[int, int], list[bytes]] = {}

    def part(self, agent: int, rows: int, data: Sequence[bytes], version: Version) -> bytes:
        """Write one agent's part of an ActionBatch.

        Args:
            rows: R.
            data: bytes of each leaf, R rows.
        """
        if version != self._version:
            self._version, self._beginnings = version, {}
        key = agent, rows
        if key not in self._beginnings:
            self._beginnings[key] = self._written(agent, rows, version)
        pairs = zip(self._beginnings[key], data, strict=True)
        return b"".join(chain.from_iterable(pairs))

    def _written(self, agent: int, rows: int, version: Version) -> list[bytes]:
        acted = to_message(version)
        head = pb.Actions(agent=agent, policy=self._policy, version=acted).SerializeToString()
        tensors = []
        for leaf in self._leaves:
            shape, size = (rows, *leaf.shape), rows * leaf.row_bytes
            tensor = pb.NamedTensor(path=leaf.path, dtype=leaf.number, shape=shape)
            begins = tensor.SerializeToString() + _TENSOR_DATA + write_varint(size)
            tensors.append(_ACTIONS_ACTIONS + write_varint(len(begins) + size) + begins)
        size = len(head) + sum(map(len, tensors)) + rows * sum(x.row_bytes for x in self._leaves)
        tensors[0] = _BATCH_AGENTS + write_varint(size) + head + tensors[0]
        return tensors


def to_message(version: Version) -> pb.PolicyVersion:
    """Convert a policy's version to a message for simulators."""
    return pb.PolicyVersion(generation=version.generation, update=version.update)
