"""Samples batches of episodes from environments with a policy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.environments.accepted_vector import on_host
from juggler.envrunner.environments.action_masks import (
    LegalActions,
    ObservedChoices,
    find_non_binary,
)
from juggler.envrunner.environments.autoreset import autoreset_mode, last_observation
from juggler.envrunner.environments.vector import reset_environments
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFiniteBatch, check_finite
from juggler.envrunner.info_numbers import InfoNumbers, InfoWatch
from juggler.envrunner.paced_slots import segments_of
from juggler.envrunner.rounds import TrainedResult
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.connector import NonFiniteObservation
from juggler.runtime.connectors.leaves import holds_masks
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import put, take, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Tree


class RunningEpisodes:
    """Ids, lengths and returns so far of the running episodes."""

    def __init__(self, rows: int) -> None:
        self._ids = np.zeros(rows, np.uint64)  # [N]
        self._lengths = np.zeros(rows, np.int64)  # [N]
        self._returns = np.zeros(rows, np.float64)  # [N]
        self._next_id = 0
        self.restart()

    def restart(self) -> None:
        """Drop all running episodes and start a new one in each environment."""
        self._ids[:] = self._new_ids(len(self._ids))
        self._lengths[:] = 0
        self._returns[:] = 0

    def advance(
        self, rewards: NDArray[np.float32], done: NDArray[np.bool_], live: NDArray[np.bool_]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64], NDArray[np.int64]]:
        """Account for one fragment.

        Args:
            rewards: [N, T]; 0 where a step is not live.
            done: [N, T], the last step of an episode.
            live: [N, T]; false only after an end.

        Returns:
            The columns [S] of its segments by row and start, and the returns [E] and lengths [E] of
            the episodes that ended, by their last steps.
        """
        rows, starts, ends = segments_of(live, done)  # [S] each
        # The first segment of a row belongs to its running episode, all others to new ones.
        continues = np.ones(len(rows), np.bool_)  # [S]
        continues[1:] = rows[1:] != rows[:-1]
        episodes = self._ids[rows]  # [S]
        episodes[~continues] = self._new_ids(int(np.count_nonzero(~continues)))
        # An episode's returns and lengths include its steps in earlier fragments.
        lengths = ends - starts + 1  # [S]
        offsets = np.where(continues, self._lengths[rows], 0)  # [S]
        # Sums from each start to the next one; steps between segments have reward 0.
        sums = np.add.reduceat(rewards.ravel(), rows * live.shape[1] + starts, dtype=np.float64)
        returns = np.where(continues, self._returns[rows], 0) + sums  # [S]

        ended = done[rows, ends]  # [S]
        last = np.ones(len(rows), np.bool_)  # [S]
        last[:-1] = continues[1:]
        at = rows[last]  # rows with a live step
        self._ids[at] = episodes[last]
        self._lengths[at] = np.where(ended, 0, offsets + lengths)[last]
        self._returns[at] = np.where(ended, 0, returns)[last]
        over = at[ended[last]]  # rows whose next step starts an episode
        self._ids[over] = self._new_ids(len(over))

        # In the order of time, as a run reports them.
        order = np.flatnonzero(ended)[np.argsort(ends[ended], kind="stable")]  # [E]
        columns: dict[str, NDArray[Any]] = {
            "segment_episodes": episodes,
            "segment_rows": rows.astype(np.int32),
            "segment_starts": starts.astype(np.int32),
            "segment_lengths": lengths.astype(np.int32),
            "segment_offsets": offsets.astype(np.int32),
        }
        return columns, returns[order], (offsets + lengths)[order]

    def _new_ids(self, count: int) -> NDArray[np.uint64]:
        self._next_id += count
        return np.arange(self._next_id - count, self._next_id, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment(TrainedResult):
    """T steps of each of N environments.

    The batch is in its own memory, so that it can be sent while the next one is sampled.
    """

    batch: EpisodeBatch
    seconds: dict[str, float]
    infos: InfoNumbers


class Sampler:
    """Steps N environments T times, and writes into [N, T] columns.

    Episodes continue from one fragment to the next.

    Args:
        env: N environments, with any autoreset mode.
        policy: acts for N rows and T steps, behind its connectors; with a data set, the recorded
            actions are used.
        steps: T.
        seed: of the environments and of the policy's noise.

    Raises:
        EnvironmentFailed: here, in `reset` or in `sample`.
        NotImplementedError: a connector cannot map a data set's actions back.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        policy: Actor,
        steps: int,
        seed: int,
    ) -> None:
        self._env, self._policy = env, policy
        self._rows, self._steps = env.num_envs, steps
        self._autoreset = autoreset_mode(env)
        self._running = RunningEpisodes(self._rows)
        self._infos = InfoWatch(self._rows, steps, self._autoreset)
        self._space = env.single_observation_space
        self._connectors = policy.connectors
        self._recorded = env if isinstance(env, RecordedEnvs) else None
        if self._recorded is not None:
            # Raises if a connector cannot map actions back.
            policy.module_to_env.undo(zeros(env.single_action_space, (self._rows,)))  # [N, ...]
        self._states: dict[str, Any] = {}  # [N, ...] at the start of each row
        self._chosen: list[Any] = []  # T x [N, ...]
        self._inputs: list[Any] = []  # T x [N, D], of the actions' distribution
        kept = self._connectors.observation_space
        self._plain = not self._connectors.rewrites and isinstance(zeros(kept), np.ndarray)
        self._legal = LegalActions.of(kept, env.single_action_space)
        self._masked = holds_masks(self._space)
        self._choices = ObservedChoices(kept, "a fragment")
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Restart with this seed; running episodes are dropped."""
        self._policy.seed(seed)
        self._policy.forget()
        self._running.restart()
        self._infos.restart()
        self._connectors.forget()
        self._resetting = np.zeros(self._rows, np.bool_)  # [N] the next step only resets
        self._first = np.ones(self._rows, np.bool_)  # [N] the next step is an episode's first
        self._step = 0  # of the fragment
        # [N, ...] that the next fragment begins with; None until the last one is checked.
        self._observation: Any = reset_environments(self._env, seed)
        self._next: Any = None  # [N, ...] after the last step

    def sample(self, version: tuple[int, int]) -> Fragment:
        """Sample one fragment.

        Args:
            version: (generation, update) of the policy's weights, stored with every step.

        Raises:
            NonFiniteBatch: an observation, a reward or a log-probability was not finite.
            EnvironmentFailed: an environment failed.
            RuntimeError: the last call raised, and `reset` was not called.
        """
        started = time.perf_counter()
        if self._observation is None:
            raise RuntimeError("the last fragment failed half-way: call reset first")
        self._make_columns()
        seconds = {"frames": time.perf_counter() - started}
        finals = self._stepped(seconds)
        live = self._set_live()
        batch_finals = self._checked_finals(finals)
        finishing = time.perf_counter()
        actions, action_logp = self._actions()
        states = self._states_of_rows(actions)
        seconds["inference"] += time.perf_counter() - finishing
        done = self._terminated | self._truncated  # [N, T]
        # Episodes end here, before the checks. An episode is at most one segment of a fragment.
        segments, returns, lengths = self._running.advance(self._rewards, done, live)
        infos = self._infos.advance(live, done)
        versions = np.empty((2, len(segments["segment_rows"])), np.uint64)
        versions[0], versions[1] = version
        # All columns are new arrays: the batch is sent while the next one is sampled.
        batch = EpisodeBatch(
            observations=self._observations,
            actions=actions,
            rewards=self._rewards,
            terminated=self._terminated,
            truncated=self._truncated,
            live=live,
            action_logp=action_logp,
            last_observations=self._last_observations,
            states=states,
            segment_generations=versions[0],
            segment_updates=versions[1],
            **batch_finals,
            **segments,
        )
        # A batch that is refused leaves no observation to continue from.
        delta = self._checked_delta(batch)
        seconds["connectors"] = time.perf_counter() - started - sum(seconds.values())
        self._observation = self._next
        return Fragment(
            batch=batch,
            version=Version(*version),
            episode_returns=returns.tolist(),
            episode_lengths=lengths.tolist(),
            connector_delta=delta,
            seconds=seconds,
            infos=infos,
        )

    def _stepped(self, seconds: dict[str, float]) -> list[tuple[int, int, Any]]:
        """Fill and check the columns; return the same as `_step_through`."""

        def place(row: int, step: int, *_: int) -> tuple[int, int]:
            return row, step

        try:
            finals = self._step_through(seconds)
        except EnvironmentFailed:
            raise
        except Exception:  # a bad observation may be the cause
            seen = tree_map(lambda column: column[:, : self._step + 1], self._observations)
            self._choices.require(seen, place)
            raise
        self._choices.require(self._observations, place)
        self._choices.require(self._last_observations, lambda row, *_: (row, self._steps))
        return finals

    def _checked_delta(self, batch: EpisodeBatch) -> State:
        """Check a batch, and return what connectors have learned from it."""
        try:
            check_finite(batch)
            return self._connectors.take_delta(batch.live)
        except NonFiniteObservation as error:
            # A connector that clips may have hidden the number from `check_finite`.
            raise NonFiniteBatch(error.row, error.step, "observations", batch.live_steps) from error
        except NonFiniteBatch as error:
            if error.column == "action_logp":
                inputs = self._inputs[error.step][error.environment]
                error.why = self._policy.why_not_finite(inputs)
            raise

    def _make_columns(self) -> None:
        """Allocate the columns of one fragment."""
        kept, n, t = self._connectors.observation_space, self._rows, self._steps
        self._observations: Any = zeros(kept, (n, t))  # [N, T, ...]
        self._last_observations: Any = zeros(kept, (n,))  # [N, ...]
        self._rewards = np.zeros((n, t), np.float32)
        self._terminated = np.zeros((n, t), np.bool_)
        self._truncated = np.zeros((n, t), np.bool_)
        self._live = np.ones((n, t), np.bool_)
        # Views by step, T x [N, ...]: the policy reads observations where they are stored.
        self._seen = _by_step(self._observations, t)

    def _step_through(self, seconds: dict[str, float]) -> list[tuple[int, int, Any]]:
        """Fill the columns; return truncated episodes' rows, steps, observations [...].

        With NEXT_STEP autoreset, the columns have these observations.
        """
        observation, self._observation = self._observation, None
        finals: list[tuple[int, int, Any]] = []
        next_step = self._autoreset is AutoresetMode.NEXT_STEP
        clock, policy, env = time.perf_counter, self._policy, self._env
        over = self._resetting  # [N] the observation is the last of an episode
        first = self._first if policy.remembers else None  # [N]
        environment = inference = 0.0
        self._chosen, self._inputs = [], []
        for t in range(self._steps):
            self._step = t
            self._see(observation, t, over if next_step else None)
            before = clock()
            sent = self._choose(t, first)  # [N, ...]
            # What is neither inference nor the environment counts as connectors.
            between = clock()
            observation, rewards, terminated, truncated, infos = env.step(sent)
            environment += clock() - between
            inference += between - before
            # Copies, because the environments may write the next results into the same memory.
            self._rewards[:, t] = rewards
            self._terminated[:, t] = terminated
            self._truncated[:, t] = truncated
            if infos:
                self._infos.see(infos, t, terminated | truncated)
            if first is not None:
                policy.rewarded(rewards)
            if first is not None or self._legal is not None:
                done = terminated | truncated  # [N]
                # Under NEXT_STEP, an episode starts after the step that only resets.
                starts, over = (over, done) if next_step else (done, over)
                first = None if first is None else starts
            if not next_step and (np.count_nonzero(terminated) or np.count_nonzero(truncated)):
                for row in np.flatnonzero(truncated & ~terminated).tolist():
                    final = self._final_observation(observation, infos, row)
                    finals.append((row, t, tree_map(np.array, final)))
                if self._autoreset is AutoresetMode.DISABLED:
                    observation, _ = env.reset(options={"reset_mask": terminated | truncated})
        self._check_masks(infos)
        self._keep_last(observation)
        if first is not None:
            self._first = first
        seconds.update(environment=environment, inference=inference)
        return finals

    def _choose(self, t: int, first: NDArray[np.bool_] | None) -> Any:
        """Choose the actions [N, ...] of step t, in the environments' form."""
        policy, seen = self._policy, self._seen[t]
        # A data set's actions are taken as they are; the module only keeps its state.
        if self._recorded is None:
            sent, chosen, inputs = policy.act(seen, first=first, keep=t == 0)
        else:
            sent, inputs = self._recorded.actions, None  # [N, ...]
            chosen = policy.module_to_env.undo(sent)  # [N, ...]
            policy.act(seen, first=first, given=chosen, keep=t == 0)
        if t == 0:
            self._states = policy.states_before()
        self._chosen.append(chosen)
        if inputs is not None:
            self._inputs.append(inputs)
        return sent

    def _see(self, observation: Any, t: int, over: NDArray[np.bool_] | None) -> None:
        """Write the observations [N, ...] of step t.

        Args:
            observation: in Gymnasium's form.
            t: of the fragment.
            over: [N] where it ends an episode, so that no action follows; None: nowhere.
        """
        if self._plain:
            self._seen[t][...] = observation
        else:
            shown = to_tree(self._space, observation)  # [N, ...]
            seen = self._choices.through(self._connectors.watch, shown, lambda row: (row, t))
            put(self._seen[t], ..., seen)
        if self._legal is not None:
            self._legal.require(self._seen[t][ACTION_MASK], t, "a fragment", over)

    def _check_masks(self, infos: Mapping[str, Any]) -> None:
        """Check the fragment's action masks, and the infos of its last step."""
        if not self._masked:
            refuse_late_mask(infos)
        # Of all steps at once: checking one would cost as much.
        if self._legal and (found := find_non_binary(self._observations[ACTION_MASK])):
            (row, step, *_), what = found
            reason = f"before step {step} of a fragment {what}"
            raise EnvironmentFailed(f"environment {row}", "step", reason)

    def _keep_last(self, observation: Any) -> None:
        """Write the observations [N, ...] after the last step."""
        shown = on_host(to_tree(self._space, observation))  # [N, ...]
        last = self._choices.through(self._connectors, shown, lambda row: (row, self._steps))
        put(self._last_observations, ..., last)
        self._next = observation

    def _actions(self) -> tuple[Tree, NDArray[np.float32]]:
        """Return chosen actions [N, T, ...], and log-probabilities [N, T] or zeros."""
        actions = tree_map(_over_steps, *self._chosen)  # [N, T, ...]
        logp = np.zeros((self._rows, self._steps), np.float32)
        if self._inputs:
            logp = self._policy.log_probabilities(_over_steps(*self._inputs), actions)
        return on_host(actions), logp

    def _states_of_rows(self, actions: Tree) -> dict[str, Tree]:
        """Return the states [N, ...] at the start of the fragment's rows.

        Args:
            actions: that were chosen [N, T, ...].
        """
        return self._states

    def _final_observation(self, observations: Any, infos: dict[str, Any], row: int) -> Any:
        """Return the last observation [...] of a truncated episode, without NEXT_STEP autoreset."""
        if self._autoreset is AutoresetMode.SAME_STEP:
            return last_observation(self._space, infos, row)
        return take(to_tree(self._space, observations), np.array(row))

    def _set_live(self) -> NDArray[np.bool_]:
        """Mark and clear the steps that only reset [N, T]."""
        # A step that is both terminated and truncated is terminal: nothing is bootstrapped.
        self._truncated &= ~self._terminated
        if self._autoreset is not AutoresetMode.NEXT_STEP:
            return self._live
        done = self._terminated | self._truncated  # [N, T]
        np.logical_not(self._resetting, out=self._live[:, 0])
        np.logical_not(done[:, :-1], out=self._live[:, 1:])
        self._resetting = done[:, -1]  # [N]
        self._rewards[~self._live] = 0
        self._terminated &= self._live
        self._truncated &= self._live
        return self._live

    def _checked_finals(self, finals: list[tuple[int, int, Any]]) -> dict[str, Any]:
        """Return the batch's columns of truncated episodes' last observations."""
        rows, steps, observations = self._final_observations(finals)
        after = (steps + 1).tolist()  # [K]
        self._choices.require(observations, lambda k, *_: (int(rows[k]), after[k]))
        places = {"final_rows": rows.astype(np.int32), "final_steps": steps.astype(np.int32)}
        return {"final_observations": observations, **places}

    def _final_observations(
        self, finals: list[tuple[int, int, Any]]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], Tree]:
        """Return rows [K], steps [K], last observations [K, ...] of truncated episodes."""
        if self._autoreset is not AutoresetMode.NEXT_STEP:
            at = np.array([final[:2] for final in finals], np.intp).reshape(-1, 2)  # [K, 2]
            shown = zeros(self._space, (len(finals),))  # [K, ...]
            for k, (_, _, observation) in enumerate(finals):
                put(shown, k, observation)
            observations = zeros(self._connectors.observation_space, (len(finals),))  # [K, ...]
            if finals:
                place = lambda k: (finals[k][0], finals[k][1] + 1)  # noqa: E731
                put(observations, ..., self._choices.through(self._connectors, shown, place))
            return at[:, 0], at[:, 1], observations
        # Under NEXT_STEP, the next step shows the last observation.
        rows, steps = np.nonzero(self._truncated)  # [K] both
        within = steps + 1 < self._steps  # [K] the next step's observation is in the row

        def after(last: NDArray[Any], all_steps: NDArray[Any]) -> NDArray[Any]:
            found = last[rows]  # [K, ...]
            found[within] = all_steps[rows[within], steps[within] + 1]
            return found

        return rows, steps, tree_map(after, self._last_observations, self._observations)


def refuse_late_mask(infos: Mapping[str, Any]) -> None:
    """Refuse action masks that come after the first reset.

    Raises:
        EnvironmentFailed: there is an action mask, which observations have no place for.
    """
    if ACTION_MASK in infos:
        reason = "it gives an action mask in its info, but gave none at its first reset"
        raise EnvironmentFailed("one of the environments", "step", reason)


def _over_steps(*leaves: Any) -> Any:
    """Stack T arrays or tensors [N, ...] to [N, T, ...]."""
    return np.stack(leaves, 1) if isinstance(leaves[0], np.ndarray) else torch.stack(leaves, 1)


def _by_step(columns: Any, steps: int) -> Any:
    """Split columns [N, T, ...] into views T x [N, ...]."""
    if isinstance(columns, np.ndarray):
        return columns.swapaxes(0, 1)
    branches = {key: _by_step(branch, steps) for key, branch in columns.items()}
    return [{key: views[t] for key, views in branches.items()} for t in range(steps)]
