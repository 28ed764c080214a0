"""One replay buffer of another library beside ours, in `replay.py`, with that library's own Python.

Called with the kind of buffer, `torchrl` or `sb3`, and one JSON object as `replay.py` makes it.
Answers each line of standard input with the microseconds of one cycle: rows are added, as many as
asked for are drawn and, by priority, their priorities written back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

torch.set_num_threads(1)


def torchrl(setting: dict[str, Any]) -> Callable[[], None]:
    from tensordict import TensorDict
    from torchrl.data import (
        LazyTensorStorage,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )

    rows, steps = setting["added"], setting["steps"]
    shape = (rows, steps) if steps > 1 else (rows,)
    columns = {
        "observation": torch.randn(*shape, setting["observed"]),
        "action": torch.randn(*shape, setting["acted"]),
        ("next", "reward"): torch.randn(*shape, 1),
        ("next", "done"): torch.zeros(*shape, 1, dtype=torch.bool),
    }
    if steps == 1:
        columns["next", "observation"] = torch.randn(*shape, setting["observed"])
    data = TensorDict(columns, batch_size=[rows])
    storage = LazyTensorStorage(setting["capacity"])
    if setting["prioritized"]:
        buffer: Any = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=storage, batch_size=setting["drawn"], priority_key="error"
        )
    else:
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=setting["drawn"])
    for _ in range(setting["capacity"] // rows + 1):
        buffer.extend(data.clone())

    def cycle() -> None:
        buffer.extend(data.clone())
        drawn = buffer.sample()
        if setting["prioritized"]:
            drawn.set("error", torch.rand(setting["drawn"]))
            buffer.update_tensordict_priority(drawn)

    return cycle


def sb3(setting: dict[str, Any]) -> Callable[[], None]:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    rows = setting["added"]
    observed = spaces.Box(-1, 1, (setting["observed"],), np.float32)
    acted = spaces.Box(-1, 1, (setting["acted"],), np.float32)
    buffer = ReplayBuffer(setting["capacity"], observed, acted, device="cpu", n_envs=rows)
    rng = np.random.default_rng(0)
    seen, after = (rng.random((rows, setting["observed"]), np.float32) for _ in range(2))
    action, reward = rng.random((rows, setting["acted"]), np.float32), rng.random(rows, np.float32)
    done, infos = np.zeros(rows, bool), [{} for _ in range(rows)]
    for _ in range(setting["capacity"] // rows + 1):
        buffer.add(seen, after, action, reward, done, infos)

    def cycle() -> None:
        buffer.add(seen, after, action, reward, done, infos)
        buffer.sample(setting["drawn"])

    return cycle


if __name__ == "__main__":
    from time import process_time

    setting = json.loads(sys.argv[2])
    cycle = {"torchrl": torchrl, "sb3": sb3}[sys.argv[1]](setting)
    print("ready", flush=True)
    for line in sys.stdin:
        count = int(line)
        started = process_time()
        for _ in range(count):
            cycle()
        print((process_time() - started) / count * 1e6, flush=True)
