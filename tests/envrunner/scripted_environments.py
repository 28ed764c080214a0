"""Environments whose every episode is known beforehand."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

Script = Sequence[tuple[int, str]]


class Scripted(gymnasium.Env):
    """Episodes of given lengths and ends ("terminated", "truncated" or "both"), over and over.

    Observations hold the number of the episode, of the step, and a state that depends on the seed
    and on every action; rewards depend on all three.
    """

    def __init__(self, script: Script = ((3, "terminated"), (2, "truncated")), box: bool = False):
        self.script = script
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = (
            gymnasium.spaces.Box(-0.5, 0.5, (2,), np.float32)
            if box
            else gymnasium.spaces.Discrete(3)
        )
        self.episode = -1
        self.over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.episode += 1
        self.steps, self.over = 0, False
        self.state = self.np_random.normal()
        return self.observation(), {}

    def step(self, action):
        assert not self.over, "stepped after the end of an episode"
        self.steps += 1
        self.state = 0.5 * self.state + float(np.sum(action)) + self.np_random.normal()
        length, end = self.script[self.episode % len(self.script)]
        self.over = self.steps == length
        reward = 100 * self.episode + self.steps + self.state
        terminated = self.over and end in ("terminated", "both")
        truncated = self.over and end in ("truncated", "both")
        return self.observation(), reward, terminated, truncated, {}

    def observation(self):
        return np.array([self.episode, self.steps, self.state], np.float32)


class NativeScripted(VectorEnv):
    """The same as one vector with one seed, which reuses the memory of its observations."""

    def __init__(self, scripts: Sequence[Script], mode: AutoresetMode, box: bool = False):
        self.envs = [Scripted(script, box) for script in scripts]
        self.num_envs = len(self.envs)
        self.metadata = {"autoreset_mode": mode}
        self.mode = mode
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observations = np.zeros((self.num_envs, 3), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        for i in np.flatnonzero(mask):
            own = None if seed is None else seed + int(i)
            self.observations[i], _ = self.envs[i].reset(seed=own)
        return self.observations, {}

    def step(self, actions):
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        infos = {}
        for i, env in enumerate(self.envs):
            if env.over:
                assert self.mode is AutoresetMode.NEXT_STEP
                self.observations[i], _ = env.reset()
                rewards[i] = 99.0  # some do
                continue
            self.observations[i], rewards[i], terminated[i], truncated[i], _ = env.step(actions[i])
            if env.over and self.mode is AutoresetMode.SAME_STEP:
                infos.setdefault("final_obs", np.zeros_like(self.observations))
                infos["final_obs"][i] = self.observations[i]
                self.observations[i], _ = env.reset()
        return self.observations, rewards, terminated, truncated, infos


class Failing(Scripted):
    """Raises, dies or hangs in one of its calls."""

    def __init__(self, call: str, how: str = "raise", at: int = 0):
        self.call, self.how, self.at, self.calls = call, how, at, 0
        self.fail_in("constructor")
        super().__init__()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.fail_in("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.fail_in("step")
        return super().step(action)

    def fail_in(self, call: str):
        if call != self.call:
            return
        self.calls += 1
        if self.calls <= self.at:
            return
        if self.how == "raise":
            self.the_guilty_line()
        if self.how == "raise what cannot be pickled":
            error = RuntimeError("the cube fell off the table")
            error.lock = threading.Lock()
            raise error
        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            threading.Event().wait()

    def the_guilty_line(self):
        raise RuntimeError("the cube fell off the table")


class NotFinite(Scripted):
    """Gives NaN at one step of its first episode: in the observation after it, or as its reward."""

    def __init__(self, at: int, column: str = "observations", script: Script = ((100, "both"),)):
        super().__init__(script)
        self.at, self.column = at, column

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if self.episode == 0 and self.steps == self.at:
            if self.column == "rewards":
                reward = np.nan
            else:
                observation[2] = np.nan
        return observation, reward, terminated, truncated, info
