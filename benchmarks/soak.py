"""A run in which something breaks every ten seconds: does anything grow or slow down?

python benchmarks/soak.py --minutes 20                     # workers that the driver starts itself
python benchmarks/soak.py --minutes 20 --workers remote    # workers over TCP, and a bad network

There are two EnvRunners and two learners. The second of each is killed, stopped and cut off. The
others live as long as the run, so that leaks in them show. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.network import Network, free_address
from support.place import (
    Command,
    Place,
    assert_books_balance,
    eventually,
    metrics,
    summary,
    trained_steps,
)

SAMPLE_SECONDS = 5.0
WARM_UP = 0.2  # of the time: caches fill, allocators settle

RUN = ["cartpole", "--run-dir", "run", "--stop-return", 501, "--checkpoint-seconds", 10]
RUN += ["--no-confirm", "--envs-per-runner", 32, "--num-learners", 2, "--devices", "fake:2"]
VICTIMS = ("envrunner 1", "learner 1")


@dataclass(frozen=True)
class Sample:
    """Resources of one process at one moment."""

    minute: float
    steps: int  # that the run has trained on
    cpu: float  # seconds that it has had
    rss: float  # MB
    pss: float  # MB
    descriptors: int
    threads: int


class Soak:
    """A run, its faults, and the resources of its processes."""

    def __init__(self, place: Place, seed: int) -> None:
        self._place = place
        self._draws = random.Random(seed)
        self._samples: dict[tuple[int, str], list[Sample]] = defaultdict(list)
        self._done: Counter[str] = Counter()
        self._stopped: dict[float, psutil.Process] = {}  # by the time to continue them
        self.run: Command
        self.faults: list[Callable[[str], str]] = [self._kill, self._stop]

    def start(self) -> None:
        self.run = self._place.start("train", *RUN, "--num-env-runners", 2)

    def look_after(self) -> None:
        """Called about every second: work that the driver does not do itself."""

    def soak(self, minutes: float, every: float) -> None:
        """Run for some minutes, with a fault every `every` seconds."""
        began = time.monotonic()
        next_fault, next_sample = began + every, began
        due: list[tuple[Callable[[str], str], str]] = []
        while (now := time.monotonic()) < began + minutes * 60:
            if self.run.status is not None:
                raise RuntimeError(f"the run has ended:\n{self.run.output}")
            self.look_after()
            if now >= next_sample:
                next_sample += SAMPLE_SECONDS
                self._sample((now - began) / 60)
            if now >= next_fault:
                next_fault += every
                if not due:
                    due = list(itertools.product(self.faults, VICTIMS))
                    self._draws.shuffle(due)
                fault, victim = due.pop()
                self._done[fault(victim)] += 1
            time.sleep(0.5)

    def processes(self) -> dict[str, Any]:
        """Samples of the processes that lived nearly all the time, by name."""
        longest = max(len(samples) for samples in self._samples.values())
        return {
            name: _growth(samples)
            for (_, name), samples in self._samples.items()
            if len(samples) >= 0.9 * longest
        }

    def done(self) -> dict[str, int]:
        return dict(self._done)

    def _sample(self, minute: float) -> None:
        steps = trained_steps(self._place.path / "run")
        for process in self._place.processes():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                sample = Sample(
                    minute,
                    steps,
                    sum(process.cpu_times()[:2]),
                    memory.rss / 1e6,
                    memory.pss / 1e6,
                    process.num_fds(),
                    process.num_threads(),
                )
                self._samples[process.pid, self._name(process)].append(sample)

    def _name(self, process: psutil.Process) -> str:
        if process.pid == self.run.process.pid:
            return "driver"
        line = " ".join(process.cmdline()).strip()
        return "resource tracker" if "resource_tracker" in line else line.removeprefix("juggler: ")

    def _kill(self, victim: str) -> str:
        self._place.worker(victim, seconds=60).kill()
        return f"SIGKILL {victim}"

    def _stop(self, victim: str) -> str:
        self._place.worker(victim, seconds=60).send_signal(signal.SIGSTOP)
        return f"SIGSTOP {victim}"


class RemoteSoak(Soak):
    """The same with workers that dial in, and are restarted like containers."""

    def __init__(self, place: Place, seed: int, network: Network) -> None:
        super().__init__(place, seed)
        self._network = network
        self._links: dict[str, str] = {}
        self._arguments: dict[str, list[object]] = {}
        self._workers: dict[str, Command] = {}
        self.faults = [self._kill, self._stop, self._break, self._cut]
        self._heals = 0.0

    def start(self) -> None:
        self.run = self._place.start("driver", *RUN, "--bind", "127.0.0.1:0")
        self.run.wait_for("waiting for workers at")
        lines = self.run.output.splitlines()
        driver = next(line for line in lines if "waiting for workers at" in line).split()[-1]
        for role in ("learner", "envrunner"):
            for index in range(2):
                name = f"{role} {index}"
                link = self._links[name] = self._network.link(driver)
                self._arguments[name] = [role, "--driver", link, "--index", index]
                if role == "learner":
                    bind = free_address()
                    advertise = self._network.link(bind)
                    self._arguments[name] += ["--bind", bind, "--advertise", advertise]
        self.look_after()

    def look_after(self) -> None:
        for name, arguments in self._arguments.items():
            if name not in self._workers or self._workers[name].status is not None:
                self._workers[name] = self._place.start(*arguments)
        if self._heals and time.monotonic() > self._heals:
            self._heals = 0.0
            self._network.heal()
        for due in [due for due in self._stopped if time.monotonic() > due]:
            with contextlib.suppress(psutil.Error):
                self._stopped.pop(due).send_signal(signal.SIGCONT)

    def _stop(self, victim: str) -> str:
        process = self._place.worker(victim, seconds=60)
        self._stopped[time.monotonic() + 15] = process  # longer than a worker may be silent
        process.send_signal(signal.SIGSTOP)
        return f"SIGSTOP {victim}"

    def _break(self, victim: str) -> str:
        self._network.break_one(self._links[victim], self._draws)
        return f"reset of {victim}"

    def _cut(self, _: str) -> str:
        self._network.cut()
        self._heals = time.monotonic() + 5
        return "cut of 5 s"


def _growth(samples: list[Sample]) -> dict[str, Any]:
    """A process's resources at the end, and their growth in a minute."""
    warm = samples[int(len(samples) * WARM_UP) :]
    minutes = [sample.minute for sample in warm]
    thirds = warm[: len(warm) // 3], warm[-(len(warm) // 3) :]
    start, end = (_cpu_per_step(part) for part in thirds)
    found: dict[str, Any] = {"cpu_us_per_step": {"first_third": start, "last_third": end}}
    for key in ("rss", "pss", "descriptors", "threads"):
        values = [getattr(sample, key) for sample in warm]
        third = len(values) // 3
        found[key] = {
            "per_minute": round(float(np.polyfit(minutes, values, 1)[0]), 4),
            "first_third": statistics.median(values[:third]),
            "last_third": statistics.median(values[-third:]),
            "least": min(values),
            "most": max(values),
        }
    return found


def _cpu_per_step(samples: list[Sample]) -> float:
    """Microseconds of CPU for each step, which other work on the machine changes least."""
    first, last = samples[0], samples[-1]
    return 1e6 * (last.cpu - first.cpu) / (last.steps - first.steps)


def _throughput(directory: Path) -> dict[str, float]:
    """Trained steps a second in the first and in the last third, and their ratio."""
    lines = [line for line in metrics(directory) if line["env_steps_trained"]]
    lines = lines[int(len(lines) * WARM_UP) :]
    third = len(lines) // 3

    def rate(part: list[dict[str, Any]]) -> float:
        steps = part[-1]["env_steps_trained"] - part[0]["env_steps_trained"]
        return float(steps / (part[-1]["wall_time"] - part[0]["wall_time"]))

    start, end = rate(lines[:third]), rate(lines[-third:])
    return {"start": start, "end": end, "ratio": end / start}


@contextlib.contextmanager
def _soaks(workers: str, seed: int) -> Iterator[tuple[Soak, Path]]:
    place = Place()
    try:
        if workers == "local":
            yield Soak(place, seed), place.path / "run"
        else:
            with Network() as network:
                yield RemoteSoak(place, seed, network), place.path / "run"
    finally:
        place.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--fault-seconds", type=float, default=10.0, help="inf: no faults")
    parser.add_argument("--workers", choices=("local", "remote"), default="local")
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    with _soaks(given.workers, given.seed) as (soak, directory):
        soak.start()
        eventually(lambda: trained_steps(directory) > 0, 120, lambda: soak.run.output)
        soak.soak(given.minutes, given.fault_seconds)
        soak.run.process.terminate()
        if soak.run.wait(20) != 128 + signal.SIGTERM:
            raise RuntimeError(soak.run.output)
        assert_books_balance(directory)
        end = summary(directory)
        own = sum(counts["trained"] for counts in end["learner_steps"].values())
        result = {
            "minutes": given.minutes,
            "workers": given.workers,
            "faults": soak.done(),
            "restarts": end["restarts"],
            "books_balance": own == end["env_steps_trained"],
            "steps": end["env_steps_trained"],
            "dropped": end["env_steps_dropped"],
            "throughput": _throughput(directory),
            "processes": soak.processes(),
        }
    for name, growth in result["processes"].items():
        for key, at in growth.items():
            print(f"{name}, {key}: {at['first_third']:.4g}, at the end {at['last_third']:.4g}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
