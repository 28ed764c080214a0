"""From environments and a policy to a batch of episodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.envrunner.environments import autoreset_mode, reset_environments
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFinite, check_finite
from juggler.envrunner.running_episodes import RunningEpisodes
from juggler.envrunner.seeding import noise_seed
from juggler.runtime.episodes.batch import EpisodeBatch

__all__ = ["Fragment", "NonFinite", "Sampler"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """What `Sampler.sample` returns: T steps of each of N environments.

    Attributes:
        batch: valid until the next sample, which writes into the same memory.
        episode_returns: undiscounted, of the episodes that ended in this fragment; their earlier
            steps may be in fragments before it.
        episode_lengths: their steps.
        seconds: where the time went: "environment", "inference", and "connectors" for the rest,
            which is what stands between them.
    """

    batch: EpisodeBatch
    episode_returns: list[float]
    episode_lengths: list[int]
    seconds: dict[str, float]


class Sampler:
    """Steps N environments T times, and writes what it sees straight into [N, T] columns.

    Episodes go on from one fragment to the next.

    Args:
        env: N environments, with any autoreset mode.
        policy: for N rows and T steps.
        steps: T.
        seed: of the environments and of the policy's noise.

    Raises:
        EnvironmentFailed: here, or in `reset` and `sample`.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], policy: BehaviourPolicy, steps: int, seed: int
    ) -> None:
        self._env, self._policy = env, policy
        self._rows, self._steps = env.num_envs, steps
        self._autoreset = autoreset_mode(env)
        self._running = RunningEpisodes(self._rows)
        shape, dtype = _shape_and_dtype(env.single_observation_space)
        self._observations = np.zeros((self._rows, steps, *shape), dtype)
        self._last_observations = np.zeros((self._rows, *shape), dtype)
        self._rewards = np.zeros((self._rows, steps), np.float32)
        self._terminated = np.zeros((self._rows, steps), np.bool_)
        self._truncated = np.zeros((self._rows, steps), np.bool_)
        self._live = np.ones((self._rows, steps), np.bool_)
        # The policy reads each step's observations where they are kept.
        self._policy_observations = torch.from_numpy(self._observations).unbind(1)  # T x [N, ...]
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Seed everything anew and start new episodes; those that were running are given up."""
        self._policy.seed(noise_seed(seed))
        self._running.restart()
        self._resetting = np.zeros(self._rows, np.bool_)  # [N] the next step only resets
        self._observation: Any = reset_environments(self._env, seed)  # [N, ...]

    def sample(self, version: tuple[int, int]) -> Fragment:
        """One fragment.

        Args:
            version: of the weights that the policy has, which every step is stamped with.

        Raises:
            NonFinite: an observation, a reward or the policy gave no finite number.
            EnvironmentFailed: an environment did.
            RuntimeError: the last sample raised, and nobody has called `reset` since.
        """
        started = time.perf_counter()
        if self._observation is None:
            raise RuntimeError("the last fragment failed in its middle: call reset first")
        seconds: dict[str, float] = {}
        finals = self._step_through(seconds)
        live = self._set_live()
        rows, steps, final_observations = self._final_observations(finals)
        finishing = time.perf_counter()
        actions, action_logp = self._policy.finish()
        seconds["inference"] += time.perf_counter() - finishing
        done = self._terminated | self._truncated  # [N, T]
        segments = self._running.advance(self._rewards, done, live)
        versions = np.empty((2, len(segments.rows)), np.uint64)
        versions[0], versions[1] = version
        batch = EpisodeBatch(
            observations=self._observations,
            actions=actions,
            rewards=self._rewards,
            terminated=self._terminated,
            truncated=self._truncated,
            live=live,
            action_logp=action_logp,
            last_observations=self._last_observations,
            final_observations=final_observations,
            final_rows=rows.astype(np.int32),
            final_steps=steps.astype(np.int32),
            segment_episodes=segments.episodes,
            segment_rows=segments.rows,
            segment_starts=segments.starts,
            segment_lengths=segments.lengths,
            segment_offsets=segments.offsets,
            segment_generations=versions[0],
            segment_updates=versions[1],
        )
        try:
            check_finite(batch)
        except NonFinite:
            self._observation = None
            raise
        seconds["connectors"] = time.perf_counter() - started - sum(seconds.values())
        returns, lengths = segments.episode_returns, segments.episode_lengths
        return Fragment(batch, returns.tolist(), lengths.tolist(), seconds)

    def _step_through(self, seconds: dict[str, float]) -> list[tuple[int, int, Any]]:
        """Fill the columns -> row, step and observation of every end that autoreset hides."""
        observation, self._observation = self._observation, None
        finals: list[tuple[int, int, Any]] = []
        next_step = self._autoreset is AutoresetMode.NEXT_STEP
        clock, policy, env = time.perf_counter, self._policy, self._env
        environment, before = 0.0, clock()
        policy.begin()
        inference = clock() - before
        for t in range(self._steps):
            self._observations[:, t] = observation
            before = clock()
            actions = policy.act(self._policy_observations[t], t)  # [N, ...]
            between = clock()
            observation, rewards, terminated, truncated, infos = env.step(actions)
            environment += clock() - between
            inference += between - before
            self._rewards[:, t] = rewards
            self._terminated[:, t] = terminated
            self._truncated[:, t] = truncated
            if not next_step and (np.count_nonzero(terminated) or np.count_nonzero(truncated)):
                cut = np.flatnonzero(truncated & ~terminated)  # [k]
                if self._autoreset is AutoresetMode.SAME_STEP:
                    finals += self._finals_in(infos, cut, t)
                else:
                    finals += [(int(row), t, np.array(observation[row])) for row in cut]
                    mask = terminated | truncated  # [N]
                    observation, _ = env.reset(options={"reset_mask": mask})
        self._last_observations[...] = observation
        self._observation = observation
        seconds.update(environment=environment, inference=inference)
        return finals

    def _finals_in(
        self, infos: dict[str, Any], cut: NDArray[np.intp], step: int
    ) -> list[tuple[int, int, Any]]:
        """Last observations of episodes that were truncated and reset within one step."""
        observations = infos.get("final_obs", [None] * self._rows)  # N of them
        for row in cut:
            if observations[row] is None:
                raise EnvironmentFailed(
                    f"environment {row}",
                    "step",
                    "it truncated an episode under SAME_STEP autoreset, and its infos have no "
                    "'final_obs', which is what to bootstrap from",
                )
        return [(int(row), step, np.array(observations[row])) for row in cut]

    def _set_live(self) -> NDArray[np.bool_]:
        """Mark the steps that only reset, and clear what they say -> live [N, T]."""
        # At both once there is nothing to bootstrap from.
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

    def _final_observations(
        self, finals: list[tuple[int, int, Any]]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[Any]]:
        """Rows, steps and last observations of the truncated episodes: [K], [K], [K, ...]."""
        shape, dtype = self._last_observations.shape[1:], self._last_observations.dtype
        if self._autoreset is not AutoresetMode.NEXT_STEP:
            at = np.array([final[:2] for final in finals], np.intp).reshape(-1, 2)  # [K, 2]
            observations = np.empty((len(finals), *shape), dtype)
            for k, (_, _, observation) in enumerate(finals):
                observations[k] = observation
            return at[:, 0], at[:, 1], observations
        rows, steps = np.nonzero(self._truncated)  # [K] both
        observations = self._last_observations[rows]  # [K, ...]
        within = steps + 1 < self._steps  # [K] the next step's observation is in the row
        observations[within] = self._observations[rows[within], steps[within] + 1]
        return rows, steps, observations


def _shape_and_dtype(space: gymnasium.Space[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if space.shape is None or space.dtype is None:
        raise ValueError(f"observations in {space} are not single arrays: nothing samples them yet")
    return space.shape, space.dtype
