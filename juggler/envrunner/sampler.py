"""Samples batches of episodes from environments with a policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.environments.accepted_vector import on_host
from juggler.envrunner.environments.action_masks import (
    LegalActions,
    ObservedChoices,
    find_non_binary,
)
from juggler.envrunner.environments.autoreset import autoreset_mode
from juggler.envrunner.environments.vector import reset_environments
from juggler.envrunner.evaluation import last_observations
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFiniteBatch, check_finite
from juggler.envrunner.info_numbers import InfoNumbers, InfoWatch
from juggler.envrunner.rounds import TrainedResult
from juggler.envrunner.together import EpisodeIds, Together, running_episodes
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.connector import NonFiniteObservation
from juggler.runtime.connectors.leaves import holds_masks
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.structures import put, take, to_tree, tree_map, zeros
from juggler.runtime.wire.trees import Tree


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
        self._new_ids = EpisodeIds()
        self._infos = InfoWatch(self._rows, steps, self._autoreset)
        self._space = env.single_observation_space
        self._connectors = policy.connectors
        self._recorded = env if isinstance(env, RecordedEnvs) else None
        if self._recorded is not None:
            # Raises if a connector cannot map actions back.
            policy.module_to_env.undo(zeros(env.single_action_space, (self._rows,)))  # [N, ...]
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
        self._running = running_episodes(self._rows)
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
        # All columns are new arrays: the batch is sent while the next one is sampled.
        self._columns = columns = Together(
            self._connectors.observation_space, self._rows, self._steps
        )
        columns.version[:] = version
        seconds = {"frames": time.perf_counter() - started}
        self._step_and_check(seconds)
        columns.step = self._steps
        # Episodes end here, before the checks.
        returns, lengths = columns.book(self._running, self._new_ids)
        infos = self._infos.advance(columns.live, columns.terminated | columns.truncated)
        finishing = time.perf_counter()
        batch = columns.batch(self._policy.log_probabilities)
        seconds["inference"] += time.perf_counter() - finishing
        # A batch that is refused leaves no observation to continue from.
        delta = self._checked_delta(batch)
        seconds["connectors"] = time.perf_counter() - started - sum(seconds.values())
        self._observation = self._next
        return Fragment(
            batch=batch,
            version=Version(*version),
            episode_returns=returns,
            episode_lengths=lengths,
            connector_delta=delta,
            seconds=seconds,
            infos=infos,
        )

    def _step_and_check(self, seconds: dict[str, float]) -> None:
        """Fill the columns, and check observations."""
        columns, choices = self._columns, self._choices

        def place(row: int, step: int, *_: int) -> tuple[int, int]:
            return row, step

        try:
            self._step_through(seconds)
        except EnvironmentFailed:
            raise
        except Exception:  # a bad observation may be the cause
            seen = tree_map(lambda column: column[:, : self._step + 1], columns.observations)
            choices.require(seen, place)
            raise
        choices.require(columns.observations, place)
        choices.require(columns.last_observations, lambda row, *_: (row, self._steps))
        self._set_live()

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
                inputs = self._columns.inputs[error.step][error.environment]
                error.why = self._policy.why_not_finite(inputs)
            raise

    def _step_through(self, seconds: dict[str, float]) -> None:
        """Fill the columns."""
        observation, self._observation = self._observation, None
        columns, next_step = self._columns, self._autoreset is AutoresetMode.NEXT_STEP
        clock, policy, env = time.perf_counter, self._policy, self._env
        over = self._resetting  # [N] the observation is the last of an episode
        first = self._first if policy.remembers else None  # [N]
        environment = inference = 0.0
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
            columns.rewards[:, t] = rewards
            columns.terminated[:, t] = terminated
            columns.truncated[:, t] = truncated
            if infos:
                self._infos.see(infos, t, terminated | truncated)
            if first is not None:
                policy.rewarded(rewards)
            if first is not None or self._legal is not None:
                done = terminated | truncated  # [N]
                # Under NEXT_STEP, an episode starts after the step that only resets.
                starts, over = (over, done) if next_step else (done, over)
                first = None if first is None else starts
            if np.count_nonzero(truncated):
                cut = (truncated & ~terminated).nonzero()[0]  # [K]
                self._keep_finals(t, cut, observation, infos)
            if self._autoreset is AutoresetMode.DISABLED and (done := terminated | truncated).any():
                observation, _ = env.reset(options={"reset_mask": done})
        self._check_masks(infos)
        self._keep_last(observation)
        if first is not None:
            self._first = first
        seconds.update(environment=environment, inference=inference)

    def _choose(self, t: int, first: NDArray[np.bool_] | None) -> Any:
        """Choose the actions [N, ...] of step t, in the environments' form."""
        policy, columns = self._policy, self._columns
        # A data set's actions are taken as they are; the module only keeps its state.
        recorded = None if self._recorded is None else self._recorded.actions  # [N, ...]
        given = None if recorded is None else policy.module_to_env.undo(recorded)  # [N, ...]
        acted = policy.act(columns.seen[t], first=first, given=given, keep=t == 0)
        if t == 0:
            columns.states = policy.states_before()
        columns.add(acted)
        return acted.sent if recorded is None else recorded

    def _see(self, observation: Any, t: int, over: NDArray[np.bool_] | None) -> None:
        """Write the observations [N, ...] of step t.

        Args:
            observation: in Gymnasium's form.
            t: of the fragment.
            over: [N] where it ends an episode, so that no action follows; None: nowhere.
        """
        seen = self._columns.seen[t]  # [N, ...]
        if self._plain:
            seen[...] = observation
        else:
            shown = to_tree(self._space, observation)  # [N, ...]
            put(seen, ..., self._through(self._connectors.watch, shown, t))
        if self._legal is not None:
            self._legal.require(seen[ACTION_MASK], t, "a fragment", over)

    def _through(self, connectors: Callable[[Any], Tree], shown: Tree, t: int) -> Tree:
        return self._choices.through(connectors, shown, lambda row: (row, t))

    def _check_masks(self, infos: Mapping[str, Any]) -> None:
        """Check the fragment's action masks, and the infos of its last step."""
        if not self._masked:
            refuse_late_mask(infos)
        # Of all steps at once: checking one would cost as much.
        if self._legal and (found := find_non_binary(self._columns.observations[ACTION_MASK])):
            (row, step, *_), what = found
            reason = f"before step {step} of a fragment {what}"
            raise EnvironmentFailed(f"environment {row}", "step", reason)

    def _keep_last(self, observation: Any) -> None:
        """Write the observations [N, ...] after the last step."""
        shown = on_host(to_tree(self._space, observation))  # [N, ...]
        put(self._columns.seen[-1], ..., self._through(self._connectors, shown, self._steps))
        self._next = observation

    def _set_live(self) -> None:
        """Mark and clear the steps that only reset."""
        columns = self._columns
        # A step that is both terminated and truncated is terminal: nothing is bootstrapped.
        columns.truncated &= ~columns.terminated
        if self._autoreset is not AutoresetMode.NEXT_STEP:
            return
        done, live = columns.terminated | columns.truncated, columns.live  # [N, T] both
        np.logical_not(self._resetting, out=live[:, 0])
        np.logical_not(done[:, :-1], out=live[:, 1:])
        self._resetting = done[:, -1]  # [N]
        columns.rewards[~live] = 0
        columns.terminated &= live
        columns.truncated &= live

    def _keep_finals(
        self, t: int, rows: NDArray[np.intp], shown: Any, infos: Mapping[str, Any]
    ) -> None:
        """Keep the last observations of truncated episodes.

        Args:
            t: step that truncated them.
            rows: [K]
            shown: [N, ...] after the step, in Gymnasium's form.
            infos: of the step.
        """

        def place(k: int, *_: int) -> tuple[int, int]:
            return int(rows[k]), t + 1

        lasts = last_observations(self._env, shown, infos, rows)  # [K, ...]
        kept = self._choices.through(self._connectors, lasts, place)
        self._choices.require(kept, place)
        self._columns.finals += [
            (row, t, take(kept, np.array(k))) for k, row in enumerate(rows.tolist())
        ]


def refuse_late_mask(infos: Mapping[str, Any]) -> None:
    """Refuse action masks that come after the first reset.

    Raises:
        EnvironmentFailed: there is an action mask, which observations have no place for.
    """
    if ACTION_MASK in infos:
        reason = "it gives an action mask in its info, but gave none at its first reset"
        raise EnvironmentFailed("one of the environments", "step", reason)
