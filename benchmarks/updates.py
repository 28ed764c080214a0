"""How long an optimizer step of DQN, SAC and TD3 takes, beside Stable-Baselines3's.

python benchmarks/updates.py                          # ours alone
python benchmarks/updates.py --peers ../peers/bin/python
python benchmarks/updates.py --device cuda:0 --peers ../peers/bin/python

32 transitions arrive, and 32 optimizer steps follow, on 256 kept transitions each; two hidden
layers of 256. DQN's steps also have the sizes of CartPole in Stable-Baselines3's zoo (64
transitions), and those of its defaults (32, layers of 64). Ours is all that a learner does with a
batch that has arrived: collation, the replay, draws, steps, target networks, metrics. The two take
turns, each in a process of its own with one thread. Times are those of CPU, which other processes
disturb little; with a GPU, those of a clock.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from replay import Buffer, compare

PEER = Path(__file__).parent / "peers" / "sb3_updates.py"
COMMON: dict[str, Any] = {
    "together": 32,
    "batch": 256,
    "capacity": 100_000,
    "begin": 1024,
    "lr": 3e-4,
    "hidden": [256, 256],
}
DQN = {**COMMON, "algorithm": "dqn", "observed": 4, "acted": 0, "choices": 2}
#: With the spaces of CartPole and HalfCheetah.
SETTINGS: dict[str, dict[str, Any]] = {
    "dqn": DQN,
    "dqn, sizes of the zoo": {**DQN, "batch": 64},
    "dqn, sizes of defaults": {**DQN, "batch": 32, "hidden": [64, 64]},
    "sac": {
        **COMMON,
        "algorithm": "sac",
        "observed": 17,
        "acted": 6,
        "choices": 0,
    },
    "td3": {**COMMON, "algorithm": "td3", "observed": 17, "acted": 6, "choices": 0},
}


def ours(setting: dict[str, Any], *, traced: bool = True) -> Callable[[], None]:
    """A function that takes a batch of transitions, and makes as many optimizer steps.

    Args:
        setting: see SETTINGS; with a `device`.
        traced: whether operations are traced.
    """
    from juggler.learner.algorithms.registry import build_learner
    from juggler.runtime.actors.resources import keep_freed_memory
    from juggler.runtime.episodes.batch import EpisodeBatch
    from juggler.runtime.tracing import TraceCache

    torch.set_num_threads(1)
    keep_freed_memory()  # as learners do
    generator, rows, steps = np.random.default_rng(0), 4, setting["together"] // 4
    keys: dict[str, Any] = {
        "algorithm": setting["algorithm"],
        "lr": setting["lr"],
        "replay_capacity": setting["capacity"],
        "replay_batch_size": setting["batch"],
        "replay_ratio": float(setting["batch"]),
        "replay_begin": setting["begin"],
        "n_step": 1,
        "batch_size": setting["together"],
    }
    if setting["choices"]:  # as Stable-Baselines3's
        keys |= {"double": False, "target_period": 10_000, "target_share": 1.0}
    observed = spaces.Box(-10, 10, (setting["observed"],), np.float32)
    acted = (
        spaces.Discrete(setting["choices"])
        if setting["choices"]
        else spaces.Box(-1, 1, (setting["acted"],), np.float32)
    )
    model = {"hidden_sizes": setting["hidden"], "activation": "relu"}
    learner = build_learner(keys, None, observed, acted, model, device=setting["device"])
    if not traced:
        learner.core._traces = None
    elif setting["device"] == "cpu":  # where, beside other work, a step may seem too slow for it
        learner.core._traces = TraceCache(slow=math.inf)

    def seen(*shape: int) -> Any:
        return generator.normal(size=(*shape, setting["observed"])).astype(np.float32)

    def batch() -> EpisodeBatch:
        actions = (
            generator.integers(setting["choices"], size=(rows, steps))
            if setting["choices"]
            else generator.uniform(-1, 1, (rows, steps, setting["acted"])).astype(np.float32)
        )
        nothing = np.zeros((rows, steps), np.bool_)
        each = np.arange(rows, dtype=np.int32)
        return EpisodeBatch(
            observations=seen(rows, steps),
            actions=actions,
            rewards=generator.normal(size=(rows, steps)).astype(np.float32),
            terminated=nothing,
            truncated=nothing,
            live=~nothing,
            action_logp=np.zeros((rows, steps), np.float32),
            last_observations=seen(rows),
            states={},
            final_observations=seen(0),
            final_rows=each[:0],
            final_steps=each[:0],
            segment_episodes=each.astype(np.uint64),
            segment_rows=each,
            segment_starts=np.zeros(rows, np.int32),
            segment_lengths=np.full(rows, steps, np.int32),
            segment_offsets=np.zeros(rows, np.int32),
            segment_generations=np.ones(rows, np.uint64),
            segment_updates=np.ones(rows, np.uint64),
        )

    def cycle() -> None:
        learner.update_from_episodes([batch()])

    for _ in range(setting["begin"] // setting["together"] + 3):  # the last ones are traced
        cycle()
    return cycle


def clock(device: str) -> float:
    """Seconds of CPU, or of a clock once a GPU is done."""
    if device == "cpu":
        return process_time()
    torch.cuda.synchronize()
    return perf_counter()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", help="Python with stable-baselines3")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="where the time of ours goes")
    parser.add_argument("--cycle", help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = {name: {**each, "device": options.device} for name, each in SETTINGS.items()}
    if options.profile:
        import cProfile
        import pstats

        for name, setting in settings.items():
            run, profile = ours(setting), cProfile.Profile()
            profile.enable()
            for _ in range(10):
                run()
            profile.disable()
            print(name, flush=True)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    elif options.cycle:
        setting = json.loads(options.cycle)
        run = ours(setting)
        print("ready", flush=True)
        for line in sys.stdin:
            started = clock(setting["device"])
            for _ in range(int(line)):
                run()
            spent = (clock(setting["device"]) - started) / int(line) / setting["together"]
            print(spent * 1e6, flush=True)
    else:
        theirs = {"sb3": [options.peers, str(PEER), "sb3"]} if options.peers else {}
        for name, setting in settings.items():
            commands = {"ours": [sys.executable, __file__, "--cycle"], **theirs}
            buffers = {key: Buffer(command, setting) for key, command in commands.items()}
            compare(name, buffers, options.rounds, 5)
