"""Environments whose every episode is known beforehand."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

Script = Sequence[tuple[int, str]]


class Scripted(gymnasium.Env):
    """Episodes of given lengths and ends, repeated.

    Observations hold the number of the episode, of the step, and a state that depends on the seed
    and on every action; rewards depend on all three. Each is written into the same array.
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
        self.shown = np.zeros(3, np.float32)

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
        self.shown[:] = self.episode, self.steps, self.state
        return self.shown


class NativeScripted(VectorEnv):
    """The same as one vector with one seed and reused memory."""

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
    """Gives NaN, or another number, at one step of an episode."""

    def __init__(
        self,
        at: int,
        column: str = "observations",
        script: Script = ((100, "both"),),
        reward: float = np.nan,
    ):
        super().__init__(script)
        self.at, self.column, self.reward = at, column, reward

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if self.episode == 0 and self.steps == self.at:
            if self.column == "rewards":
                reward = self.reward
            else:
                observation[2] = np.nan
        return observation, reward, terminated, truncated, info


class AsTrees(gymnasium.Wrapper):
    """The same with Dict and Tuple observations and all actions.

    The first of the actions is the one that counts.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.observation_space = as_tree_space(env.observation_space)
        self.action_space = spaces.Dict(
            {
                "act": spaces.Tuple([env.action_space]),
                "others": spaces.Dict(
                    {"bits": spaces.MultiBinary(2), "many": spaces.MultiDiscrete([2, 3])}
                ),
            }
        )

    def reset(self, **options: Any):
        observation, info = self.env.reset(**options)
        return as_tree(observation), info

    def step(self, action):
        assert action in self.action_space, action
        observation, *rest = self.env.step(action["act"][0])
        return as_tree(observation), *rest


def scripted_trees(script: Script, box: bool = False) -> AsTrees:
    return AsTrees(Scripted(script, box))


def as_tree(observation):
    """Plain observations [..., 3] as those of `AsTrees`."""
    whole = observation[..., 1].astype(np.int64)
    return {"count": whole, "floats": (observation[..., :1], {"state": observation[..., 2:]})}


def as_tree_space(plain: spaces.Box) -> spaces.Dict:
    float_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    floats = spaces.Tuple([float_space, spaces.Dict({"state": float_space})])
    return spaces.Dict({"count": spaces.Discrete(100), "floats": floats})


class NativeAsTrees(VectorWrapper):
    """`AsTrees` as one vector, with batched final observations."""

    def __init__(self, env: NativeScripted):
        super().__init__(env)
        single = AsTrees(env.envs[0])
        self.single_observation_space = single.observation_space
        self.single_action_space = single.action_space
        self.observation_space = batch_space(single.observation_space, env.num_envs)
        self.action_space = batch_space(single.action_space, env.num_envs)

    def reset(self, **options: Any):
        observations, infos = self.env.reset(**options)
        return as_tree(observations), infos

    def step(self, actions):
        assert actions in self.action_space, actions
        observations, *rest, infos = self.env.step(actions["act"][0])
        if "final_obs" in infos:
            infos["final_obs"] = as_tree(infos["final_obs"])
        return as_tree(observations), *rest, infos


class Masked(gymnasium.Wrapper):
    """Says which of its three actions are legal, and insists on that.

    Args:
        where: "info", or "observation", where it is in a Dict.
        mask: of a plain observation; by default all but one are legal, another one in each step.
        silent_at: the step of an episode whose info has no mask.
        at_ends: whether there is a mask when an episode is over.
    """

    def __init__(self, env, where="info", mask=None, silent_at=-1, at_ends=True):
        super().__init__(env)
        self.where, self.mask, self.silent_at, self.at_ends = where, mask, silent_at, at_ends
        if where == "observation":
            masks = spaces.Box(0, 1, (3,), np.int8)
            self.observation_space = spaces.Dict(
                {"action_mask": masks, "numbers": env.observation_space}
            )

    def reset(self, **options: Any):
        observation, _ = self.env.reset(**options)
        return self.masked(observation, over=False)

    def step(self, action):
        assert self.legal[action], f"{action} is illegal"
        observation, reward, terminated, truncated, _ = self.env.step(action)
        observation, info = self.masked(observation, terminated or truncated)
        return observation, reward, terminated, truncated, info

    def masked(self, observation, over: bool):
        self.legal = (self.mask or mask_of)(observation)
        if self.where == "observation":
            return {"numbers": observation, "action_mask": self.legal}, {}
        given = observation[1] != self.silent_at and (self.at_ends or not over)
        return observation, {"action_mask": self.legal} if given else {}


def mask_of(observation: np.ndarray) -> np.ndarray:
    """The masks [..., 3] that `Masked` gives for plain observations [..., 3]."""
    illegal = (observation[..., 0] + observation[..., 1]).astype(int) % 3
    return (np.arange(3) != illegal[..., None]).astype(np.int8)


def masked(script: Script, **options: Any) -> Masked:
    return Masked(Scripted(script), **options)


class MaskedParts(gymnasium.Wrapper):
    """Several actions with one legal choice each, by step.

    Masks are laid out as those of Gymnasium's own `sample(mask)`; one action has none.
    """

    def __init__(self, script: Script):
        super().__init__(Scripted(script))
        self.action_space = spaces.Dict(
            {
                "free": spaces.Discrete(2),
                "pair": spaces.Tuple([spaces.Discrete(3), spaces.MultiDiscrete([2, 3])]),
            }
        )

    def reset(self, **options: Any):
        observation, _ = self.env.reset(**options)
        return observation, {"action_mask": self.masks()}

    def step(self, action):
        first, (left, right) = action["pair"]
        assert (first, left, right) == self.legal(), action
        observation, *rest, _ = self.env.step(first)
        return observation, *rest, {"action_mask": self.masks()}

    def masks(self):
        places = zip((3, 2, 3), self.legal(), strict=True)
        first, left, right = (np.eye(n, dtype=np.int8)[i] for n, i in places)
        return {"pair": (first, (left, right))}

    def legal(self):
        steps = self.unwrapped.steps
        return steps % 3, steps % 2, (steps + 1) % 3


def loop(_: object) -> None:
    """Loop in C, where no signal handler of Python runs."""
    deque(itertools.repeat(None), maxlen=0)
