"""CartPoles as rows of tensors, and a plain torch loop that trains on them on the same device.

    python benchmarks/tensor_cartpole.py --envs 4096              # the loop alone
    python benchmarks/gpu.py tensors                              # beside a run of Juggler

The loop has the network, environments, steps and passes of the run that it is compared with. It
prints one JSON line: environment steps trained on per second, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from single_process import improve, tower, vtrace
from torch import Tensor
from torch.distributions import Categorical

#: Position, velocity, angle and angular velocity that end an episode, and bounds of the space.
LIMITS = torch.tensor([2.4, torch.inf, 12 * torch.pi / 180, torch.inf])
BOUND = np.array([4.8, np.inf, 0.42, np.inf], np.float32)
MOST_STEPS = 500


class CartPoles(VectorEnv[Tensor, Tensor, Tensor]):
    """Gymnasium's CartPole-v1, whose episodes restart in the step that ends them."""

    #: Number of parts in which a step of 0.02 s is computed.
    parts = 1
    single_observation_space = gymnasium.spaces.Box(-BOUND, BOUND)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, num_envs: int = 4096) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = num_envs
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.generator = torch.Generator(self.device)
        self.limits = LIMITS.to(self.device)  # [4]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state = self._begin()  # [N, 4]
        self.ages = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)  # [N]
        return self.state.clone(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        force = actions * 20.0 - 10.0  # [N]
        for _ in range(self.parts):
            self.state = self.state + self._change(force) * (0.02 / self.parts)  # [N, 4]
        self.ages = self.ages + 1  # [N]
        terminated = (self.state.abs() > self.limits).any(1)  # [N]
        truncated = (self.ages >= MOST_STEPS) & ~terminated  # [N]
        ended, last = terminated | truncated, self.state  # [N], [N, 4]
        self.state = torch.where(ended[:, None], self._begin(), self.state)  # [N, 4]
        self.ages = self.ages.masked_fill(ended, 0)  # [N]
        rewards = torch.ones(self.num_envs, device=self.device)  # [N]
        return self.state.clone(), rewards, terminated, truncated, {"final_obs": last}

    def _begin(self) -> Tensor:
        drawn = torch.rand(self.num_envs, 4, generator=self.generator, device=self.device)
        return drawn * 0.1 - 0.05  # [N, 4]

    def _change(self, force: Tensor) -> Tensor:
        """The state's derivative: a cart of 1 kg, and a pole of 0.1 kg and 1 m."""
        _, speed, angle, turning = self.state.unbind(1)  # [N] each
        sine, cosine = angle.sin(), angle.cos()  # [N] both
        pushed = (force + 0.05 * turning**2 * sine) / 1.1  # [N]
        turned = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))  # [N]
        return torch.stack([speed, pushed - 0.05 * turned * cosine / 1.1, turning, turned], 1)


class FineCartPoles(CartPoles):
    """A heavier environment: CartPoles in steps of 0.6 ms."""

    parts = 32


class Loop:
    """Samples and trains in turn, without a copy to the host."""

    def __init__(self, env: CartPoles, steps: int) -> None:
        self._env, self._steps = env, steps
        self._actor = tower(4, 2).to(env.device)
        self._critic = tower(4, 1).to(env.device)
        self._parameters = [*self._actor.parameters(), *self._critic.parameters()]
        self._optimizer = torch.optim.Adam(self._parameters, lr=1e-3)
        self._observation, _ = env.reset(seed=0)  # [N, 4]

    def _policy(self, seen: Tensor) -> Categorical:
        # Validation would wait for the device.
        return Categorical(logits=self._actor(seen), validate_args=False)

    def update(self) -> None:
        columns: list[list[Tensor]] = [[], [], [], [], [], [], []]
        for _ in range(self._steps):
            with torch.no_grad():
                policy = self._policy(self._observation)
                actions = policy.sample()  # [N]
                logps = policy.log_prob(actions)  # [N]
            seen = self._observation
            self._observation, rewards, terminated, truncated, infos = self._env.step(actions)
            step = (seen, infos["final_obs"], actions, logps, rewards, terminated, truncated)
            for column, values in zip(columns, step, strict=True):
                column.append(values)
        self._train(*map(torch.stack, columns))  # [T, N, ...] each

    def _train(
        self,
        seen: Tensor,
        following: Tensor,
        actions: Tensor,
        logps: Tensor,
        rewards: Tensor,
        terminated: Tensor,
        truncated: Tensor,
    ) -> None:
        policy = self._policy(seen)
        values = self._critic(seen).squeeze(-1)  # [T, N]
        new_logps = policy.log_prob(actions)  # [T, N]
        with torch.no_grad():
            next_values = self._critic(following).squeeze(-1)  # [T, N]
            # A truncated step has the value after it in its reward, and nothing is carried over it.
            rewards = rewards * 0.1 + 0.99 * truncated * next_values  # [T, N]
            ratios = (new_logps - logps).exp()  # [T, N]
            continues = (~(terminated | truncated)).float()  # [T, N]
            targets, advantages = vtrace(
                values.detach(), next_values, rewards, ratios, continues
            )  # [T, N] both
        live = torch.ones_like(rewards)  # [T, N]: all steps count
        improve(
            *(self._optimizer, self._parameters, policy, new_logps, values),
            *(targets, advantages, live),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--fine", action="store_true", help="the heavier environment")
    given = parser.parse_args()
    torch.set_num_threads(1)
    env = (FineCartPoles if given.fine else CartPoles)(given.envs)
    loop = Loop(env, given.steps)

    def rate(seconds: float) -> float:
        updates, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            loop.update()
            updates += 1
        torch.get_device_module(env.device).synchronize()
        return updates * given.steps * given.envs / (time.perf_counter() - begin)

    rate(2.0)
    print(json.dumps({"steps_per_second": rate(given.seconds)}))


if __name__ == "__main__":
    main()
