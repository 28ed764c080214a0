"""The speed of a vector environment in a plain loop with random actions."""

from __future__ import annotations

import argparse
import json
import time

import gymnasium


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    env = gymnasium.make_vec("CartPole-v1", num_envs=given.envs, vectorization_mode="sync")
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(64)]
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < given.seconds:
        env.step(actions[steps % 64])
        steps += 1
    rate = steps * given.envs / (time.perf_counter() - started)
    print(json.dumps({"steps_per_second": rate}))


if __name__ == "__main__":
    main()
