"""PPO by Stable-Baselines3, beside ours in `sample_efficiency.py`, with that package's own Python.

Called with one JSON object: the environment's id, how many run side by side, steps, the seed, and
`ppo`, keywords of `stable_baselines3.PPO`. Prints one JSON line: after each rollout, how many steps
there were and the mean return of the last 100 episodes.
"""

from __future__ import annotations

import json
import sys

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env


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
    model = PPO("MlpPolicy", env, seed=given["seed"], device="cpu", **given["ppo"])
    model.learn(given["steps"], callback=curve)
    print(json.dumps({"steps": curve.steps, "returns": curve.returns}))


if __name__ == "__main__":
    main()
