"""The baseline for PPO: a plain torch loop in one process, as one would write it by hand.

It has the same environment, network, batch, epochs and minibatches as the run of Juggler that it is
compared with. Prints one JSON line: environment steps trained on per second after a warm-up, and
the share of time spent on updates.
"""

from __future__ import annotations

import argparse
import json
import time

import gymnasium
import torch
from single_process import tower
from torch import nn
from torch.distributions import Categorical

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
EPOCHS, MINIBATCHES = 4, 4


def gae(values, last_value, rewards, dones):
    """GAE (Schulman et al. 2016) by its recurrence; all tensors are [T, N]."""
    advantages = torch.empty_like(values)
    carried = torch.zeros_like(last_value)
    for t in reversed(range(len(values))):
        after = values[t + 1] if t + 1 < len(values) else last_value
        delta = rewards[t] + GAMMA * (1 - dones[t]) * after - values[t]
        carried = delta + GAMMA * LAMBDA * (1 - dones[t]) * carried
        advantages[t] = carried
    return advantages


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()

    torch.set_num_threads(1)
    env = gymnasium.make_vec(
        "CartPole-v1", num_envs=given.envs, vectorization_mode="vector_entry_point"
    )
    actor, critic = tower(4, 2), tower(4, 1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-5)
    shape = (given.steps, given.envs)
    observations = torch.zeros(*shape, 4)
    actions = torch.zeros(shape, dtype=torch.long)
    logps, rewards, dones, live, values = (torch.zeros(shape) for _ in range(5))

    observation, _ = env.reset(seed=0)
    was_done = torch.zeros(given.envs, dtype=torch.bool)
    warm_up, trained, updating, started = 2.0, 0, 0.0, time.perf_counter()
    begin = started
    while time.perf_counter() - begin < given.seconds:
        for t in range(given.steps):
            observations[t] = torch.from_numpy(observation)
            with torch.no_grad():
                policy = Categorical(logits=actor(observations[t]))
                actions[t] = policy.sample()
                logps[t] = policy.log_prob(actions[t])
                values[t] = critic(observations[t]).squeeze(-1)
            observation, reward, terminated, truncated, _ = env.step(actions[t].numpy())
            done = torch.from_numpy(terminated | truncated)
            rewards[t] = torch.from_numpy(reward) * 0.1
            dones[t] = done
            live[t] = ~was_done  # the step after an end only resets
            was_done = done

        updating -= time.perf_counter()
        with torch.no_grad():
            last_value = critic(torch.from_numpy(observation)).squeeze(-1)
            advantages = gae(values, last_value, rewards, dones)
            targets = (advantages + values).flatten()
        flat = live.flatten().nonzero().squeeze(1)
        b_observations, b_actions = observations.flatten(0, 1), actions.flatten()
        b_logps, b_advantages = logps.flatten(), advantages.flatten()
        for _ in range(EPOCHS):
            for places in flat[torch.randperm(len(flat))].chunk(MINIBATCHES):
                seen = b_observations[places]
                policy = Categorical(logits=actor(seen))
                new_values = critic(seen).squeeze(-1)
                ratios = (policy.log_prob(b_actions[places]) - b_logps[places]).exp()
                weights = b_advantages[places]
                weights = (weights - weights.mean()) / (weights.std() + 1e-8)
                loss = (
                    -torch.min(ratios * weights, ratios.clamp(1 - CLIP, 1 + CLIP) * weights).mean()
                    + 0.25 * (new_values - targets[places]).square().mean()
                    - 0.01 * policy.entropy().mean()
                )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        updating += time.perf_counter()
        trained += len(flat)
        if started == begin and time.perf_counter() - begin > warm_up:
            started, trained, updating = time.perf_counter(), 0, 0.0
    seconds = time.perf_counter() - started
    print(json.dumps({"steps_per_second": trained / seconds, "updating": updating / seconds}))


if __name__ == "__main__":
    main()
