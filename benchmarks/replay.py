"""How long a replay takes, beside the buffers of TorchRL and Stable-Baselines3.

python benchmarks/replay.py                          # ours alone, by the number of kept rows
python benchmarks/replay.py --peers ../peers/bin/python

One cycle adds rows, draws a sample and, by priority, writes the priorities of its rows back. The
buffers are full. They take turns, each in a process of its own with one thread. Times are those of
CPU, which other processes disturb little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import process_time
from typing import Any

import torch

PEER = Path(__file__).parent / "peers" / "replay_buffers.py"
#: As HalfCheetah's.
SIZES = {"observed": 17, "acted": 6}
TRANSITIONS = {"added": 256, "drawn": 256, "steps": 1, "capacity": 1_000_000, **SIZES}
SEQUENCES = {"added": 8, "drawn": 64, "steps": 80, "capacity": 10_000, **SIZES}
SETTINGS: dict[str, dict[str, Any]] = {
    "transitions": {**TRANSITIONS, "prioritized": False},
    "transitions, 10,000 kept": {**TRANSITIONS, "prioritized": False, "capacity": 10_000},
    "transitions by priority": {**TRANSITIONS, "prioritized": True},
    "transitions by priority, 10,000 kept": {
        **TRANSITIONS,
        "prioritized": True,
        "capacity": 10_000,
    },
    "sequences": {**SEQUENCES, "prioritized": False},
    "sequences by priority": {**SEQUENCES, "prioritized": True},
}
#: How many rows are kept in the same cycle, each beside the other.
FEW, MANY = 10_000, 1_000_000
SCALED: dict[str, dict[str, Any]] = {
    "transitions": {**TRANSITIONS, "prioritized": False},
    "transitions by priority": {**TRANSITIONS, "prioritized": True},
    "sequences of 8": {**SEQUENCES, "steps": 8, "prioritized": False},
    "sequences of 8 by priority": {**SEQUENCES, "steps": 8, "prioritized": True},
}


def ours(setting: dict[str, Any]) -> Any:
    """A function that makes one cycle."""
    from juggler import Replay

    torch.set_num_threads(1)
    rows, steps = setting["added"], setting["steps"]
    columns = {
        "observations": torch.randn(rows, steps, setting["observed"]),
        "last_observations": torch.randn(rows, setting["observed"]),
        "actions": torch.randn(rows, steps, setting["acted"]),
        "rewards": torch.randn(rows, steps),
        "discounts": torch.ones(rows, steps),
        "live": torch.ones(rows, steps, dtype=torch.bool),
    }
    replay = Replay(
        dict,
        capacity=setting["capacity"],
        size=setting["drawn"],
        ratio=setting["drawn"] / rows,
        begin=setting["capacity"] * steps,
        priority_exponent=0.6 if setting["prioritized"] else 0.0,
        importance_exponent=0.4,
    )

    def cycle() -> None:
        for _ in replay.add(columns):
            if setting["prioritized"]:
                replay.update_priorities(torch.rand(setting["drawn"]))

    for _ in range(setting["capacity"] // rows + 1):
        cycle()
    return cycle


class Buffer:
    """A process with a buffer that answers with the microseconds of CPU of a cycle."""

    def __init__(self, command: list[str], setting: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [*command, json.dumps(setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RL_LOGGING_LEVEL": "ERROR"},
        )
        assert self._process.stdout is not None
        while self._process.stdout.readline() != "ready\n":  # a library may greet before
            assert self._process.poll() is None, f"{command[-1]} ended"

    def time(self, cycles: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{cycles}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def commands_for(setting: dict[str, Any], peers: str | None) -> dict[str, list[str]]:
    """What is compared, ours first."""
    commands = {"ours": [sys.executable, __file__, "--cycle"]}
    if peers:
        commands["torchrl"] = [peers, str(PEER), "torchrl"]
        if setting["steps"] == 1 and not setting["prioritized"]:
            commands["sb3"] = [peers, str(PEER), "sb3"]
    return commands


def compare(name: str, buffers: dict[str, Buffer], rounds: int, cycles: int = 100) -> None:
    """Print the times of processes that take turns, by name, as ratios to that of the first.

    Args:
        name: of the setting.
        buffers: the processes.
        rounds: turns of each.
        cycles: of each turn.
    """
    times: dict[str, list[float]] = {key: [] for key in buffers}
    for _ in range(rounds):
        for key, buffer in buffers.items():
            times[key].append(buffer.time(cycles))
    for buffer in buffers.values():
        buffer.close()
    first = next(iter(times))
    for key, values in times.items():
        ratios = [each / own for each, own in zip(values, times[first], strict=True)]
        print(
            f"{name}: {key} {statistics.median(values):.0f} us, least {min(values):.0f} us, "
            f"{statistics.median(ratios):.2f} of {first} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", help="Python with torchrl and stable-baselines3")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cycle", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cycle:
        run = ours(json.loads(options.cycle))
        print("ready", flush=True)
        for line in sys.stdin:
            started = process_time()
            for _ in range(int(line)):
                run()
            print((process_time() - started) / int(line) * 1e6, flush=True)
    else:
        for each, given in SETTINGS.items():
            commands = commands_for(given, options.peers)
            buffers = {key: Buffer(command, given) for key, command in commands.items()}
            compare(each, buffers, options.rounds)
        for each, given in SCALED.items():
            (command,) = commands_for(given, None).values()
            buffers = {
                f"{count:,} kept": Buffer(command, {**given, "capacity": count})
                for count in (FEW, MANY)
            }
            compare(each, buffers, options.rounds)
