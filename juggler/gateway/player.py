"""From the steps of many simulators to rows of batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from juggler.gateway.environments import Environments
from juggler.gateway.episode_log import EpisodeLog
from juggler.gateway.publisher import Publisher
from juggler.gateway.recordings import Reader, Recorder, Recording
from juggler.gateway.row_layout import Layout, ValueChecks
from juggler.gateway.sessions import SessionError
from juggler.gateway.step_batches import Steps
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.building import EnvToModule
from juggler.runtime.connectors.leaves import at, holds_masks
from juggler.runtime.connectors.mergeable_state import State, merge
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import put, take, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import training_pb2


@dataclass(slots=True, eq=False)
class Acted:
    """The answer to a batch of steps.

    Attributes:
        steps: the batch.
        actions: of all its rows, the bytes of each leaf of the action space.
        version: of the weights that acted.
    """

    steps: Steps
    actions: list[bytes]
    version: Version


class Player:
    """Acts in environments that simulators step, and records the steps in rows.

    A row begins only when samples are asked for: steps wait until then.

    Args:
        observation_space: the simulators'.
        action_space: of the actions that simulators get.
        policy: acts.
        connectors: between the simulators and the policy.
        steps: T.
        row_age: maximum number of updates by which the weights of a row's first step may be old.

    Attributes:
        layout: of observations.
        action_layout: of actions.
        environments: of simulators.
        version: of the policy's weights.
        waiting: steps without an answer.
        recorder: makes rows of recordings.
        reader: reads and checks recordings.
        publisher: hands out the policy.
        episode_log: hears of every step, if episodes are recorded.
    """

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        policy: Actor,
        connectors: EnvToModule,
        steps: int,
        row_age: int,
    ) -> None:
        self.layout = Layout(observation_space)
        self.action_layout = Layout(action_space)
        self.version = Version(0, 0)
        self.waiting: deque[Steps] = deque()
        self._action_space = action_space
        self._nothing = zeros(observation_space, (1,))  # [1, ...] shown by a paused row
        if holds_masks(observation_space):
            for _, mask in flatten(at(self._nothing, (ACTION_MASK,))):
                mask[...] = 1
        self._policy, self._connectors = policy, connectors
        self._checks = ValueChecks(observation_space, action_space)
        self.environments = Environments(connectors.observation_space, policy, steps, row_age)
        self.recorder = Recorder(self.environments, policy, row_age, self._see)
        self.reader = Reader(observation_space, policy.module_to_env.action_space)
        self.publisher = Publisher(policy, observation_space, action_space)
        self.episode_log: EpisodeLog | None = None
        self._delta: State = {}

    def unseat(self, places: list[int]) -> None:
        """Remove environments that are gone."""
        gone = set(places)
        self.waiting = deque(each for each in self.waiting if int(each.slots[0]) not in gone)
        self.recorder.unseat(gone)
        if self.episode_log is not None:
            self.episode_log.drop(gone)
        self.environments.unseat(places)

    # -- steps that come --------------------------------------------------------------------------

    def arrive(self, arrivals: list[Steps]) -> list[tuple[Steps, SessionError]]:
        """Take the results of actions -> refused batches, and why."""
        refused: list[tuple[Steps, SessionError]] = []
        while arrivals:
            rows = sum(steps.rows for steps in arrivals)
            shown = self.layout.tree([steps.raw for steps in arrivals], rows)  # [B, ...]
            bad = self._bad(arrivals, shown)
            if bad is None:
                self._take(arrivals, shown)
                break
            refused.append(bad)
            arrivals = [steps for steps in arrivals if steps is not bad[0]]
        return refused

    def first_bad(self, steps: Steps) -> SessionError | None:
        """Why a batch cannot be taken, if that is so."""
        bad = self._bad([steps], self.layout.tree([steps.raw], steps.rows))
        return None if bad is None else bad[1]

    def _bad(self, arrivals: list[Steps], shown: Tree) -> tuple[Steps, SessionError] | None:
        """The first batch whose observations cannot be used, and why."""
        begin = 0
        if any(steps.paused for steps in arrivals):
            put(shown, np.flatnonzero(~_shown(arrivals)), self._nothing)
        unchecked = any(not steps.checked for steps in arrivals)
        found = self._checks.first_bad(shown) if unchecked else None
        if found is not None:
            row, error = found
            for steps in arrivals:
                if row < begin + steps.rows:
                    return steps, _said(error, steps, row - begin)
                begin += steps.rows
        for steps in arrivals:
            if steps.truncated:
                finals = self.layout.tree([steps.final_raw], len(steps.final_rows))
                places = {row: place for place, row in enumerate(steps.final_rows)}
                finals = take(finals, [places[row] for row in steps.truncated])
                found = self._checks.first_bad(finals, masks=False)
                if found is not None:
                    return steps, _said(found[1], steps, steps.truncated[found[0]])
                steps.final_observations = self._connectors(finals)  # [K, ...]
        return None

    def _take(self, arrivals: list[Steps], shown: Tree) -> None:
        slots = np.concatenate([steps.slots for steps in arrivals])  # [B]
        if self.episode_log is not None:
            self.episode_log.arrive(arrivals, shown)
        observations = self._see(shown, partial(_shown, arrivals))  # [B, ...]
        self.environments.take_results(arrivals, slots, observations)
        begin = 0
        for steps in arrivals:
            steps.observations, steps.shown, steps.begin = observations, shown, begin
            begin += steps.rows
            steps.acting = steps.slots
            if steps.paused:
                steps.acting = np.delete(steps.slots, steps.paused)
                waits = (
                    self.environments.rest if steps.session.episodes else self.environments.pause
                )
                waits(steps.slots[steps.paused])
            self.waiting.append(steps)

    def _see(self, shown: Tree, live: Callable[[], NDArray[np.bool_]]) -> Tree:
        """Observations [B, ...] of simulators, as batches hold them.

        Args:
            live: returns [B], the observations that connectors learn from.
        """
        observations: Tree = self._connectors.watch(shown)
        if self._connectors.rewrites:
            delta = self._connectors.take_delta(live()[:, None])
            self._delta = merge(self._delta, delta) if self._delta else delta
        return observations

    def record(self, recording: Recording) -> None:
        """Take steps that were chosen elsewhere."""
        if self.episode_log is not None:
            self.episode_log.record(recording)
        self.recorder.arrive(recording)

    # -- actions that go -------------------------------------------------------------------------

    def act(self, wanted: int, most_rows: int, holds_up: bool) -> list[Acted]:
        """Answer steps that wait, oldest first.

        Args:
            wanted: rows that may begin. A batch of steps that needs more begins all of its rows if
                at least one may begin.
            most_rows: of steps at once; a single batch of steps may have more.
            holds_up: steps wait until their rows may begin; else they are not recorded.
        """
        # Steps that wait for a request would hold up an evaluation.
        holds_up = holds_up and self.environments.evaluation is None
        chosen, recording = self._next(wanted, most_rows, holds_up)
        if not chosen:
            return []
        places = np.concatenate([steps.acting for steps in chosen])  # [B]
        sent: list[bytes] = []
        if len(places):
            seen = _gathered(chosen, "observations")  # [B, ...]
            if self.environments.evaluation is None:
                actions = self.environments.act(places, recording, seen)
                tree = to_tree(self._action_space, actions)  # [B, ...]
            else:
                tree = self._with_evaluation(chosen, places, recording, seen)
            if self.episode_log is not None:
                self.episode_log.act(places, tree)
            arrays = _arrays(tree)
            leaves = zip(arrays, self.action_layout.leaves, strict=True)
            sent = [np.asarray(array, leaf.dtype).tobytes() for array, leaf in leaves]
        answers, begin = [], 0
        for steps in chosen:
            end = begin + len(steps.acting)
            data = [
                content[begin * leaf.row_bytes : end * leaf.row_bytes]
                for content, leaf in zip(sent, self.action_layout.leaves, strict=False)
            ]
            if steps.paused:
                data = self._of_all_rows(steps, data)
            answers.append(Acted(steps, data, self.version))
            begin = end
        return answers

    def _with_evaluation(
        self,
        chosen: list[Steps],
        places: NDArray[np.intp],
        recording: NDArray[np.bool_],
        seen: Tree,
    ) -> Tree:
        """Actions [B, ...] for places [B], of which an evaluation chooses some."""
        environments = self.environments
        assert environments.evaluation is not None
        first = environments.of["first"][places]  # [B]
        evaluated = environments.evaluated(places)  # [B]
        actions = environments.act(places, recording & ~evaluated, seen)
        tree = to_tree(self._action_space, actions)  # [B, ...]
        if not evaluated.any():
            return tree
        shown = take(_gathered(chosen, "shown"), evaluated)
        greedy = environments.evaluation.act(places[evaluated], first[evaluated], shown)
        mixed: Tree = tree_map(np.array, tree)  # memory of its own, which can be written to
        put(mixed, np.flatnonzero(evaluated), to_tree(self._action_space, greedy))
        return mixed

    def _next(
        self, wanted: int, most_rows: int, holds_up: bool
    ) -> tuple[list[Steps], NDArray[np.bool_]]:
        """The batches to answer now, and which rows [B] are recorded."""
        chosen: list[Steps] = []
        recording: list[bool] = []
        everyone = sum(steps.rows for steps in self.waiting)
        if everyone <= min(wanted, most_rows):
            chosen, self.waiting = list(self.waiting), deque()
            return chosen, np.ones(sum(len(steps.acting) for steps in chosen), np.bool_)
        later: deque[Steps] = deque()
        rows = standing = 0
        while self.waiting and (not rows or rows < most_rows):
            steps = self.waiting.popleft()
            new = int(np.count_nonzero(self.environments.of["row"][steps.acting] < 0))
            if new and wanted <= 0 and holds_up and not steps.session.real_time:
                later.append(steps)
                standing += len(steps.acting) - new
                continue
            if new and wanted <= 0:
                recording += (self.environments.of["row"][steps.acting] >= 0).tolist()
            else:
                recording += [True] * len(steps.acting)
                wanted -= new
            chosen.append(steps)
            rows += len(steps.acting)
        if not chosen and wanted + standing > 0:
            # Some rows stand still because others of their batch wait for a row.
            chosen.append(later.popleft())
            recording = [True] * len(chosen[0].acting)
        later.extend(self.waiting)
        self.waiting = later
        return chosen, np.array(recording, np.bool_)

    def _of_all_rows(self, steps: Steps, actions: list[bytes]) -> list[bytes]:
        """Bytes of each leaf, with zeros for rows without an action."""
        everyone = _arrays(zeros(self._action_space, (steps.rows,)))
        out = set(steps.paused)
        acting = [i for i in range(steps.rows) if i not in out]
        # There may be no actions.
        for array, leaf, content in zip(everyone, self.action_layout.leaves, actions, strict=False):
            array[acting] = np.frombuffer(content, leaf.dtype).reshape(-1, *leaf.shape)
        return [array.tobytes() for array in everyone]

    # -- weights and batches --------------------------------------------------------------------

    def use(self, weights: Tree, version: Version) -> None:
        """Act with other weights from now on."""
        self._policy.load(weights)
        self.version = version
        self.environments.hand_in_old(version)
        self.recorder.use(version)

    def seed(self, seed: int) -> None:
        self._policy.seed(seed)

    def take_notes(self) -> list[training_pb2.Note]:
        """What is to be said of how the policy acts, each once."""
        return self._policy.take_notes()

    def learn_from_others(self, state: State) -> None:
        """Take over what connectors of all EnvRunners have learned."""
        self._connectors.set_state(state)

    def batch(self, rows: int) -> tuple[EpisodeBatch, list[tuple[float, int]], State]:
        """A batch of rows, ended episodes, and what connectors have learned."""
        batch = self.environments.rows.batch(rows, self._policy.log_probabilities)
        delta, self._delta = self._delta, {}
        return batch, self.take_ended(), delta

    def take_ended(self) -> list[tuple[float, int]]:
        """Return and length of the episodes that ended since the last call."""
        ended, self.environments.ended = self.environments.ended, []
        return ended

    def take_stale(self) -> int:
        """Steps that were dropped since the last call, with complete rows."""
        return self.recorder.take_stale() + self.environments.drop_stale()


def _shown(arrivals: list[Steps]) -> NDArray[np.bool_]:
    """[B] the rows that show an observation."""
    shows = np.ones(sum(steps.rows for steps in arrivals), np.bool_)
    begin = 0
    for steps in arrivals:
        if steps.paused:
            shows[np.add(steps.paused, begin)] = False
        begin += steps.rows
    return shows


def _gathered(chosen: list[Steps], name: str) -> Any:
    """A tree [B, ...] of the rows that act, of several turns."""
    parts = []
    for steps in chosen:
        places: Any = slice(steps.begin, steps.begin + steps.rows)
        if steps.paused:
            out = set(steps.paused)
            places = [steps.begin + at for at in range(steps.rows) if at not in out]
        parts.append((getattr(steps, name), places))
    same = parts[0][0]
    count = len(next(iter(_arrays(same))))
    whole = all(tree is same for tree, _ in parts) and sum(s.rows for s in chosen) == count
    if whole and not any(steps.paused for steps in chosen):
        return same
    trees = [take(tree, places) for tree, places in parts]
    return tree_map(lambda *arrays: np.concatenate(arrays), *trees)


def _arrays(tree: Any) -> list[NDArray[Any]]:
    """The arrays of a tree, in its order."""
    if isinstance(tree, np.ndarray):
        return [tree]
    return [array for branch in tree.values() for array in _arrays(branch)]


def _said(error: SessionError, steps: Steps, at: int) -> SessionError:
    text = f"{steps.agent.at(steps.environments[at])}: {error}"
    return SessionError(error.code, text, steps.seq, error.retryable)
