"""Steps that somebody else took in an environment, read and checked."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from juggler.gateway.row_layout import Layout, ValueChecks, check_rewards, read_infos
from juggler.gateway.sessions import Code, Session, SessionError
from juggler.runtime.connectors.leaves import acted_dtype, at, holds_masks
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import space_leaves, take, tree_map
from juggler.runtime.wire.trees import Path, Tree, flatten, path_name, unflatten
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_ROUNDED = 1e-3  # rounding of a log-probability of 0 in other programs


@dataclass(slots=True, eq=False)
class Recording:
    """L steps of one environment, within one episode.

    Attributes:
        session: of the simulator.
        seq: of the message.
        environment: its number in the session.
        observations: a tree [L + 1, ...], as batches hold them.
        actions: a tree [L, ...], as batches hold them.
        rewards: [L]
        action_logp: [L]
        starts: the first step begins an episode.
        terminated: the last step ended it.
        truncated: the last step cut it off.
        version: of the weights that acted; None: not known.
        infos: [L, K] numbers that its simulator tells of each step; None: it tells none.
        taken: how many of the steps were used.
        stale: some of them were too old to be learned from.
        bytes: of its message.
        arrived: seconds of `time.perf_counter`.
    """

    session: Session
    seq: int
    environment: int
    observations: Tree
    actions: Tree
    rewards: NDArray[np.float32]
    action_logp: NDArray[np.float32]
    starts: bool
    terminated: bool
    truncated: bool
    version: Version | None
    infos: NDArray[np.float64] | None = None
    taken: int = 0
    stale: bool = False
    bytes: int = 0
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def place(self) -> int:
        """The place of its environment in the gateway."""
        return self.session.alone.slots[self.environment]

    @property
    def left(self) -> int:
        """Steps that were not used yet."""
        return len(self.rewards) - self.taken


class Reader:
    """Reads recordings, and checks them.

    Args:
        observation_space: the simulators'.
        action_space: of the actions that policies choose.
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        self._observations, self._actions = Layout(observation_space), Layout(action_space)
        self._checks = ValueChecks(observation_space, action_space)
        self._leaves = space_leaves(action_space)
        self._masked = holds_masks(observation_space)
        self._counts = not any(isinstance(space, spaces.Box) for _, space in self._leaves)

    def read(self, session: Session, message: pb.Recording) -> Recording:
        """
        Raises:
            SessionError: its session may not send that.
        """
        try:
            self._check_place(session, message)
            return self._read(session, message)
        except SessionError as error:
            error.seq = message.seq
            raise

    def _check_place(self, session: Session, message: pb.Recording) -> None:
        if message.agent:
            text = f"a recording of agent {message.agent}: this session has agent 0 alone"
            raise SessionError(Code.UNKNOWN_AGENT, text)
        known, environment = session.environments, message.environment
        if environment >= known:
            text = f"environment {environment}: the hello announced 0 to {known - 1}"
            raise SessionError(Code.UNKNOWN_ENVIRONMENT, text)
        if not message.starts and not session.alone.acted[environment]:
            text = (
                f"environment {environment} is in no episode: the first recording of one says "
                "starts, and the last one terminated or truncated"
            )
            raise SessionError(Code.OUT_OF_ORDER, text)

    def _read(self, session: Session, message: pb.Recording) -> Recording:
        steps = len(message.rewards)
        if not steps:
            text = "a recording without rewards: send one for each of its steps, at least 1"
            raise SessionError(Code.WRONG_SHAPE, text)
        check_rewards(message.rewards, lambda step: f"step {step}")
        rewards = np.array(message.rewards, np.float32)  # [L]
        raw = self._observations.raw(message.observations, steps + 1, "observations")
        observations = self._observations.tree([raw], steps + 1)  # [L + 1, ...]
        self._check_observations(observations, message.terminated or message.truncated)
        raw = self._actions.raw(message.actions, steps, "actions")
        actions = self._actions.tree([raw], steps)  # [L, ...]
        self._check_actions(observations, actions)
        return Recording(
            session,
            message.seq,
            message.environment,
            observations,
            self._as_chosen(actions),
            rewards,
            self._log_probabilities(message.action_logp, steps),
            message.starts,
            message.terminated,
            message.truncated and not message.terminated,
            _version(session, message),
            read_infos(session, message.infos, steps, "steps"),
        )

    def _check_observations(self, observations: Tree, ended: bool) -> None:
        """The last observation of an episode need not allow any action."""
        if ended:
            last = tree_map(lambda array: array[-1:], observations)  # [1, ...]
            observations = tree_map(lambda array: array[:-1], observations)  # [L, ...]
            if found := self._checks.first_bad(last, masks=False):
                raise found[1]
        if found := self._checks.first_bad(observations):
            raise SessionError(found[1].code, f"step {found[0]}: {found[1]}")

    def _log_probabilities(self, given: Any, steps: int) -> NDArray[np.float32]:
        if len(given) != steps:
            raise SessionError(
                Code.NO_LOG_PROBABILITIES,
                f"{len(given)} action_logp for {steps} steps: how far the policy has moved from "
                "that which acted is known from its log-probabilities alone. Send the one of each "
                "action; where nobody kept them, nothing can be learned from the data here",
            )
        action_logp = np.array(given, np.float32)  # [L]
        _must_be_finite(action_logp, "action_logp")
        if self._counts and action_logp.max() > _ROUNDED:
            step = int(action_logp.argmax())
            raise SessionError(
                Code.NO_LOG_PROBABILITIES,
                f"action_logp [{step}] is {action_logp[step]}: no choice among so many has a "
                "log-probability above 0. Send logarithms of probabilities",
            )
        return action_logp

    def _check_actions(self, observations: Tree, actions: Tree) -> None:
        """Check that the space and the masks allow the actions."""
        for path, space in self._leaves:
            array, where = at(actions, path), f" at {path_name(path)}" if path else ""
            if array.dtype.kind == "f":
                _must_be_finite(array, f"actions{where}")
            if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
                counts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
                places = (array - space.start).reshape(len(array), -1)  # [L, choices]
                bad = ((places < 0) | (places >= counts)).any(1)  # [L]
                if not bad.any() and self._masked:
                    bad = self._illegal(observations, path, counts, places)
                if bad.any():
                    step = int(bad.argmax())
                    text = f"the action{where} of step {step} is {array[step]}"
                    raise SessionError(
                        Code.WRONG_SHAPE, f"{text}, which its space or its mask does not have"
                    )
            elif isinstance(space, spaces.MultiBinary) and (array & ~1).any():
                text = f"the actions{where} have other numbers than 0 and 1"
                raise SessionError(Code.WRONG_SHAPE, text)

    def _illegal(
        self, observations: Tree, path: Path, counts: NDArray[Any], places: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """[L] where one of the choices [L, choices] was not allowed; `counts` has their numbers."""
        masks = dict(flatten(at(observations, (ACTION_MASK,))))
        if path not in masks:
            return np.zeros(len(places), np.bool_)
        starts = np.cumsum([0, *counts[:-1]])  # [choices]
        flat = masks[path][: len(places)].reshape(len(places), -1)  # [L, sum of counts]
        allowed = np.take_along_axis(flat, starts + places, 1)  # [L, choices]
        illegal: NDArray[np.bool_] = (allowed == 0).any(1)  # [L]
        return illegal

    def _as_chosen(self, actions: Tree) -> Tree:
        """Actions in the dtypes that policies act in."""
        return unflatten(
            [
                (path, at(actions, path).astype(acted_dtype(space), copy=False))
                for path, space in self._leaves
            ]
        )


def steps_of(tree: Tree, begin: int, end: int) -> Tree:
    """Some of a tree [L, ...]; a view."""
    some: Tree = take(tree, slice(begin, end))
    return some


def _version(session: Session, message: pb.Recording) -> Version | None:
    if session.mode == pb.LOGGED_DATA:
        return None
    if not message.HasField("version"):
        text = "a recording without a version: send that of the policy that acted"
        raise SessionError(Code.UNKNOWN_VERSION, text)
    return Version(message.version.generation, message.version.update)


def _must_be_finite(array: NDArray[Any], what: str) -> None:
    if not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0].tolist()
        text = f"{what} {place} is {array[tuple(place)]}: send finite numbers"
        raise SessionError(Code.NOT_FINITE, text)
