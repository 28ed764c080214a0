"""One vector step of a policy: in torch, in NumPy, and in NumPy written by hand for this network.

All three act in turns on the same observations of CartPole with a tower of 2×64 tanh. An act has
its share of a fragment of 32 steps: drawing noise before them, log-probabilities of all of them
after. Times are CPU time of one thread, in µs, the least of 20 fragments in each turn, since other
work on the machine empties the caches. Prints one JSON line, with the parts of a runner's step too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from juggler.envrunner.sampler import Sampler
from juggler.envrunner.sampling_worker import numpy_in_one_thread
from juggler.runtime.acting.actor import Actor
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.runtime.modules.models import ActorCritic

STEPS = 32


class ByHand:
    """The same policy, as one would write it for this network alone."""

    def __init__(self, module: Any, rows: int) -> None:
        layers = [module.encoder[0], module.encoder[2], module.policy_head]
        self.weights = [np.ascontiguousarray(layer.weight.detach().numpy().T) for layer in layers]
        self.biases = [layer.bias.detach().numpy() for layer in layers]
        self.rows, self.random = rows, np.random.default_rng(0)

    def begin(self) -> None:
        uniform = self.random.random((STEPS, self.rows, 2), np.float32)
        self.noise = -np.log(-np.log(np.clip(uniform, 1e-30, 1 - 1e-7)))
        self.logits = np.empty((self.rows, STEPS, 2), np.float32)
        self.actions = np.empty((self.rows, STEPS), np.int64)

    def act(self, x: Any, step: int) -> Any:
        for weights, bias in zip(self.weights[:2], self.biases[:2], strict=True):
            x = x @ weights
            x += bias
            np.tanh(x, out=x)
        x = x @ self.weights[2]
        x += self.biases[2]
        self.logits[:, step] = x
        chosen = (x + self.noise[step]).argmax(-1)
        self.actions[:, step] = chosen
        return chosen

    def finish(self) -> Any:
        shifted = self.logits - self.logits.max(-1, keepdims=True)
        logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return np.take_along_axis(logp, self.actions[..., None], -1)


def policies(rows: int) -> dict[str, Any]:
    env = gymnasium.make("CartPole-v1")
    torch.manual_seed(0)
    module = ActorCritic(env.observation_space, env.action_space, {})
    strip_to_acting(module)
    in_numpy, in_torch = (Actor(module, rows, STEPS, 0) for _ in range(2))
    in_torch._acting._in_numpy = {}
    return {"torch": in_torch, "numpy": in_numpy, "by_hand": ByHand(module, rows)}


def fragment(policy: Any, observations: Any) -> float:
    """µs an act."""
    begin = time.thread_time()
    if isinstance(policy, ByHand):
        policy.begin()
        for step in range(STEPS):
            policy.act(observations[:, step], step)
        policy.finish()
    else:
        acted = [policy.act(observations[:, step]) for step in range(STEPS)]
        inputs, chosen = (np.stack(each, 1) for each in list(zip(*acted, strict=True))[:0:-1])
        policy.log_probabilities(inputs, chosen)
    return 1e6 * (time.thread_time() - begin) / STEPS


def compare(rows: int, rounds: int, fragments: int) -> dict[str, list[float]]:
    """For each policy, µs an act in each round."""
    every = policies(rows)
    observations = np.random.default_rng(1).normal(size=(rows, STEPS, 4)).astype(np.float32)
    for policy in every.values():
        fragment(policy, observations)
    times: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, policy in every.items():
            times[name].append(min(fragment(policy, observations) for _ in range(fragments)))
    return times


def parts(rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """For torch and NumPy, where the µs of a runner's step go: medians of fragments."""
    samplers = {}
    for name, policy in policies(rows).items():
        if name == "by_hand":
            continue
        env = gymnasium.make_vec("CartPole-v1", rows, vectorization_mode="vector_entry_point")
        samplers[name] = Sampler(env, policy, STEPS, 0)
    clock: Callable[[], float] = time.perf_counter
    time.perf_counter = time.thread_time  # the sampler's clock
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in samplers}
    for _ in range(40 * rounds):
        for name, sampler in samplers.items():
            for part, spent in sampler.sample((0, 0)).seconds.items():
                seconds[name].setdefault(part, []).append(1e6 * spent / STEPS)
    time.perf_counter = clock
    return {
        name: {part: statistics.median(spent) for part, spent in each.items()}
        for name, each in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fragments", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    numpy_in_one_thread()
    found = {rows: compare(rows, given.rounds, given.fragments) for rows in given.rows}
    print(json.dumps({"acts": found, "parts": parts(64, given.rounds)}))


if __name__ == "__main__":
    main()
