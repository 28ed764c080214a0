"""Algorithms of Stable-Baselines3, beside ours in `sample_efficiency.py`, with that package's own
Python.

Called with one JSON object: the environment's id, how many run side by side, steps, the seed, the
name of a class of `stable_baselines3`, and its keywords; `noise` is the deviation of what is added
to actions. Prints one JSON line: after each rollout, how many steps there were, and the mean return
of the last 100 episodes; and that of greedy play at the end.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import stable_baselines3
import torch
from greedy import greedy_return
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise, VectorizedActionNoise


class Curve(BaseCallback):
    """Keeps what PPO logs as rollout/ep_rew_mean."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.returns: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        if episodes := self.model.ep_info_buffer:
            self.steps.append(self.num_timesteps)
            self.returns.append(float(sum(each["r"] for each in episodes) / len(episodes)))


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    # Each environment in a Monitor, all of them one after the other in this process.
    env = make_vec_env(given["env"], n_envs=given["n_envs"], seed=given["seed"])
    curve = Curve()
    keys = given["keys"]
    if noise := given.get("noise"):
        mean = np.zeros(env.action_space.shape)
        one = NormalActionNoise(mean, np.full_like(mean, noise))
        keys["action_noise"] = VectorizedActionNoise(one, given["n_envs"])
    make = getattr(stable_baselines3, given["algorithm"])
    model = make("MlpPolicy", env, seed=given["seed"], device="cpu", **keys)
    model.learn(given["steps"], callback=curve)
    greedy = greedy_return(lambda x: model.predict(x, deterministic=True)[0], given["env"])
    print(json.dumps({"steps": curve.steps, "returns": curve.returns, "greedy": greedy}))


if __name__ == "__main__":
    main()
