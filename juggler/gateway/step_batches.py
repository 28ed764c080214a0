"""Read and check a simulator's batches of steps, and write the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from juggler.gateway.row_layout import Layout, check_rewards, read_infos
from juggler.gateway.sessions import Code, Session, SessionAgent, SessionError
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.chunks import write_varint
from juggler.runtime.wire.v1 import simulator_pb2 as pb


@dataclass(slots=True, eq=False)
class Steps:
    """R rows of one agent of a session.

    Most are lists, as the rows of many sessions become arrays together.

    Attributes:
        session: of the simulator.
        agent: of the session.
        batch: that they came in.
        environments: [R] their numbers in the session.
        player: whose places these are.
        slots: [R] their places in that player.
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
        early: rewards from before the first action in an episode, with their places.
        shares: what several players take of it, where line-ups are drawn; []: one takes all.
        shared: those of them that have acted, with their actions and the versions of their weights.
        checked: its observations can be used.
        final_observations: [K, ...] of the K truncated rows, as batches hold them; set by the
            player.
        begin: where its rows begin in `observations`.
        observations: a tree [B, ...] of all rows of a turn; set by the player.
        shown: likewise, as simulators show them.
        acting: places in the player of the rows that want an action; set by the player.
        rows: R.
    """

    session: Session
    agent: SessionAgent
    batch: Batch
    environments: list[int]
    player: str
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
    early: list[tuple[int, float]] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    shared: list[tuple[Share, list[bytes], Version]] = field(default_factory=list)
    checked: bool = False
    final_observations: Any = None
    begin: int = 0
    observations: Any = None
    shown: Any = None
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
        """Places where the episode ended or was cut off."""
        return [*self.terminated, *self.truncated]


@dataclass(slots=True, eq=False)
class Share(Steps):
    """What one player takes of the rows of an agent.

    Attributes:
        whole: all of these rows.
        within: [R] where its own are among them.
    """

    whole: Steps = field(kw_only=True)
    within: list[int] = field(kw_only=True)


@dataclass(slots=True, eq=False)
class Batch:
    """What one message says of a session's agents.

    Attributes:
        session: of the simulator.
        seq: of the message.
        parts: of different agents.
        over: the environments whose episodes are over with it, if the session counts them or tells
            infos.
        began: those whose next episodes begin with it, where line-ups are drawn.
        answers: the actions of each part, by the index of its agent.
        arrived: seconds of `time.perf_counter`.
    """

    session: Session
    seq: int
    parts: list[Steps] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
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
            batch.over, batch.began, early = session.episodes.follow(batch.parts, continuing)
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
    early = _early(rows, count, agent, environments) if rows.early_rewards else []
    raw = layout.raw(rows.observations, count, "observations")
    final_raw, final_rows = _finals(rows, count, truncated, layout)
    return Steps(
        session,
        agent,
        batch,
        environments,
        agent.player,
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
        early,
    )


def _early(
    rows: pb.Rows, count: int, agent: SessionAgent, environments: list[int]
) -> list[tuple[int, float]]:
    """Rewards from before the first action in an episode, with their places."""
    given = list(rows.early_rewards)
    _must_have(len(given), count, "early rewards")
    check_rewards(given, lambda row: agent.at(environments[row]))
    places = (at for at, each in enumerate(environments) if not agent.acted[each])
    return [(at, given[at]) for at in places if given[at]]


def split(part: Steps, before: Sequence[str], after: Sequence[str], layout: Layout) -> None:
    """Give the rows of an agent to their players.

    What a row says of the last action is for the player that acted; the observation to act on is
    for the one that plays the episode which begins.

    Args:
        part: the rows, R of them.
        before: [R] the players that have acted.
        after: [R] the players that act next.
        layout: of observations.
    """
    part.checked = True
    if before == after and len({*after}) == 1:
        _give_all(part, after[0])
        return
    ended, paused = set(part.ended), set(part.paused)
    taken: dict[str, list[tuple[int, bool, bool]]] = {}  # rows, that end and that act next
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        ends, acts = row in ended, row not in paused
        if ends and acts and old != new:
            taken.setdefault(old, []).append((row, True, False))
            taken.setdefault(new, []).append((row, False, True))
        else:
            taken.setdefault(new if acts else old, []).append((row, ends, acts))
    if len(taken) == 1:
        _give_all(part, *taken)
        return
    part.shares = [_share(part, player, rows, layout) for player, rows in taken.items()]


def _give_all(part: Steps, player: str) -> None:
    part.player = player
    part.slots = part.acting = part.agent.seats[player][part.environments]


def _share(part: Steps, player: str, taken: list[tuple[int, bool, bool]], layout: Layout) -> Share:
    rows = [row for row, _, _ in taken]
    final_of = {row: place for place, row in enumerate(part.final_rows)}
    terminated, truncated = set(part.terminated), set(part.truncated)
    ends = [(at, row) for at, (row, ended, _) in enumerate(taken) if ended]
    finals = [(at, final_of[row]) for at, row in ends if row in final_of]
    environments = [part.environments[row] for row in rows]
    return Share(
        part.session,
        part.agent,
        part.batch,
        environments,
        player,
        part.agent.seats[player][environments],
        [part.rewards[row] for row in rows],
        [],
        [at for at, row in ends if row in terminated],
        [at for at, row in ends if row in truncated],
        [at for at, (_, _, acts) in enumerate(taken) if not acts],
        layout.picked(part.raw, rows),
        layout.picked(part.final_raw, [place for _, place in finals]),
        [at for at, _ in finals],
        None,
        checked=part.checked,
        whole=part,
        within=rows,
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
    """The places of the set flags [R], which may be left out."""
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


#: Fields and wire types of simulator.proto.
_TO_SIMULATOR_ACTIONS = b"\x12"
_BATCH_SEQ, _BATCH_AGENTS = b"\x08", b"\x12"
_ACTIONS_ACTIONS = b"\x22"
_TENSOR_DATA = b"\x22"


class Part(NamedTuple):
    """The actions of one agent.

    Attributes:
        size: in bytes.
        pieces: the bytes.
    """

    size: int
    pieces: list[bytes]


def action_batch(seq: int, parts: Sequence[Part], more: bytes) -> bytes:
    """A ToSimulator with an ActionBatch.

    Args:
        seq: of the batch of steps.
        parts: the actions of its agents.
        more: other fields of the ActionBatch.
    """
    number = write_varint(seq)
    size = 1 + len(number) + sum(part.size for part in parts) + len(more)
    head = [_TO_SIMULATOR_ACTIONS, write_varint(size), _BATCH_SEQ, number]
    return b"".join(chain(head, *(part.pieces for part in parts), [more]))


class Answers:
    """
    Args:
        layout: of actions.
        policy: the name of the policy that acts.
    """

    def __init__(self, layout: Layout, policy: str) -> None:
        self._leaves = layout.leaves
        self._policy = policy
        self._version: Version | None = None
        # By agent and rows, of that version.
        self._beginnings: dict[tuple[int, int], tuple[int, list[bytes]]] = {}

    def part(self, agent: int, rows: int, data: Sequence[bytes], version: Version) -> Part:
        """Make one agent's part of a message.

        Args:
            agent: its index in the session.
            rows: R.
            data: of each leaf, R rows.
            version: of the weights that acted.
        """
        if version != self._version:
            self._version, self._beginnings = version, {}
        key = agent, rows
        if key not in self._beginnings:
            self._beginnings[key] = self._written(agent, rows, version)
        size, beginnings = self._beginnings[key]
        return Part(size, [*chain.from_iterable(zip(beginnings, data, strict=True))])

    def _written(self, agent: int, rows: int, version: Version) -> tuple[int, list[bytes]]:
        """The size of the part, and the bytes before each leaf."""
        acted = to_message(version)
        head = pb.Actions(agent=agent, policy=self._policy, version=acted).SerializeToString()
        tensors = []
        for leaf in self._leaves:
            shape = (rows, *leaf.shape)
            tensor = pb.NamedTensor(path=leaf.path, dtype=leaf.number, shape=shape)
            begins = tensor.SerializeToString() + _TENSOR_DATA + write_varint(rows * leaf.row_bytes)
            size = len(begins) + rows * leaf.row_bytes
            tensors.append(_ACTIONS_ACTIONS + write_varint(size) + begins)
        size = len(head) + sum(map(len, tensors)) + rows * sum(x.row_bytes for x in self._leaves)
        tensors[0] = _BATCH_AGENTS + write_varint(size) + head + tensors[0]
        return len(_BATCH_AGENTS) + len(write_varint(size)) + size, tensors


def to_message(version: Version) -> pb.PolicyVersion:
    """The version of a policy as simulators are told it."""
    return pb.PolicyVersion(generation=version.generation, update=version.update)
