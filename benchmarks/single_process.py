"""The baseline: a plain torch loop in one process, as one would write it by hand.

It has the same environment, network, batch and number of passes as the run of Juggler that it is
compared with. Prints one JSON line: environment steps trained on per second, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import time

import gymnasium
import torch
from torch import nn
from torch.distributions import Categorical

GAMMA = 0.99


def tower(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def vtrace(values, next_values, rewards, ratios, continues):
    """V-trace (Espeholt et al. 2018) by its recurrence; all tensors are [T, N]."""
    rho = ratios.clamp(max=1.0)
    deltas = rho * (rewards + GAMMA * continues * next_values - values)
    targets = torch.empty_like(values)
    carried = torch.zeros_like(values[0])
    for t in reversed(range(len(values))):
        carried = deltas[t] + GAMMA * continues[t] * rho[t] * carried
        targets[t] = values[t] + carried
    next_targets = torch.cat([targets[1:], next_values[-1:]])
    return targets, rho * (rewards + GAMMA * continues * next_targets - values)


def improve(optimizer, parameters, policy, new_logps, values, targets, advantages, live):
    """One optimizer step; live: the steps [T, N] that count."""
    loss = (
        -(live * advantages * new_logps).sum()
        + 0.25 * (live * (targets - values).square()).sum()
        - 0.01 * (live * policy.entropy()).sum()
    ) / live.sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--sync", action="store_true", help="SyncVectorEnv instead of native")
    given = parser.parse_args()

    torch.set_num_threads(1)
    mode = "sync" if given.sync else "vector_entry_point"
    env = gymnasium.make_vec("CartPole-v1", num_envs=given.envs, vectorization_mode=mode)
    actor, critic = tower(4, 2), tower(4, 1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    shape = (given.steps, given.envs)
    observations = torch.zeros(given.steps + 1, given.envs, 4)
    actions = torch.zeros(shape, dtype=torch.long)
    logps, rewards, continues, live = (torch.zeros(shape) for _ in range(4))

    observation, _ = env.reset(seed=0)
    was_done = torch.zeros(given.envs, dtype=torch.bool)
    warm_up, trained, started = 2.0, 0, time.perf_counter()
    begin = started
    while time.perf_counter() - begin < given.seconds:
        for t in range(given.steps):
            observations[t] = torch.from_numpy(observation)
            with torch.no_grad():
                policy = Categorical(logits=actor(observations[t]))
                actions[t] = policy.sample()
                logps[t] = policy.log_prob(actions[t])
            observation, reward, terminated, truncated, _ = env.step(actions[t].numpy())
            done = torch.from_numpy(terminated | truncated)
            rewards[t] = torch.from_numpy(reward)
            continues[t] = ~done
            live[t] = ~was_done  # the step after an end only resets
            was_done = done
        observations[-1] = torch.from_numpy(observation)

        policy = Categorical(logits=actor(observations[:-1]))
        all_values = critic(observations).squeeze(-1)
        new_logps = policy.log_prob(actions)
        with torch.no_grad():
            ratios = (new_logps - logps).exp()
            targets, advantages = vtrace(
                all_values[:-1], all_values[1:], rewards * 0.1, ratios, continues
            )
        values = all_values[:-1]
        improve(optimizer, parameters, policy, new_logps, values, targets, advantages, live)
        trained += int(live.sum())
        if started == begin and time.perf_counter() - begin > warm_up:
            started, trained = time.perf_counter(), 0
    print(json.dumps({"steps_per_second": trained / (time.perf_counter() - started)}))


if __name__ == "__main__":
    main()
