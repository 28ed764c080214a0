"""How long a run takes to recover from a fault: `python benchmarks/recovery.py [--times 5]`.

For each fault: the longest time without an update, and the time until the process that was hit, or
its replacement, does its share again. Then the throughput lost while one of four EnvRunners is
down. Takes ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from juggler.driver.monitoring import STATUS_METHOD
from juggler.driver.reporting.run_directory import RunDirectoryError, find_driver
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.wire.v1 import status_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from commands import machine, table
from support.network import Network, free_address
from support.place import Command, Place

LOOK_SECONDS = 0.02
#: A process that dies again within a minute is started again later.
ROUND_SECONDS = 62.0
ENDLESS = ["--run-dir", "run", "--stop-return", 501, "--no-confirm"]
SLOW_ENVIRONMENT = """
import time
from gymnasium.envs.classic_control import CartPoleEnv

class SlowCartPole(CartPoleEnv):
    def step(self, action):
        time.sleep(0.002)
        return super().step(action)
"""


class Observer:
    """Asks a driver for the run's status many times a second."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ask: Any = None

    def look(self) -> status_pb2.RunStatus | None:
        """The status; None if there is no driver."""
        try:
            if self._ask is None:
                self._ask = dial(find_driver(self._directory)).unary_unary(
                    STATUS_METHOD,
                    request_serializer=status_pb2.StatusRequest.SerializeToString,
                    response_deserializer=status_pb2.RunStatus.FromString,
                )
            found: status_pb2.RunStatus = self._ask(status_pb2.StatusRequest(), timeout=10)
            return found
        except (RunDirectoryError, grpc.RpcError):
            self._ask = None
            return None

    def until(
        self, good: Callable[[status_pb2.RunStatus], bool], seconds: float = 60.0
    ) -> tuple[float, float]:
        """Seconds until a condition holds, and the longest time without an update until then."""
        began = last_update = time.monotonic()
        pause, updates = 0.0, -1
        while (now := time.monotonic()) < began + seconds:
            status = self.look()
            if status is not None:
                if (trained := _trained(status)) != updates:
                    pause, last_update = max(pause, now - last_update), now
                    updates = trained
                if good(status):
                    return now - began, pause
            time.sleep(LOOK_SECONDS)
        raise RuntimeError(f"not within {seconds} s: {self.look()}")

    def all_at_work(self, workers: int) -> None:
        """Wait until this many workers have done something, and all are ready."""

        def good(status: status_pb2.RunStatus) -> bool:
            ready = [each for each in status.workers if each.state == "ready" and each.steps]
            return len(ready) == workers

        self.until(good)
        time.sleep(2.0)

    def recovery(self, worker_id: str, fault: Callable[[], None]) -> tuple[float, float]:
        """Seconds without an update, and until another process does its share."""
        before = _worker(self.look(), worker_id)
        joined: list[int] = []  # its steps when it joined

        def good(status: status_pb2.RunStatus) -> bool:
            worker = _worker(status, worker_id)
            if worker.pid == before.pid or worker.state != "ready":
                return False
            joined.append(worker.steps)
            return worker.steps > joined[0]

        fault()
        full, pause = self.until(good)
        return pause, full


def _worker(status: status_pb2.RunStatus | None, worker_id: str) -> status_pb2.WorkerStatus:
    assert status is not None
    return next(each for each in status.workers if each.worker_id == worker_id)


def _trained(status: status_pb2.RunStatus) -> int:
    """Steps that learners trained on, which grow with each update."""
    return sum(each.steps for each in status.workers if each.role == "learner")


@contextlib.contextmanager
def _run(*options: object) -> Iterator[tuple[Place, Command, Observer]]:
    place = Place()
    try:
        run = place.start("train", *options, *ENDLESS)
        yield place, run, Observer(place.path / "run")
    finally:
        place.close()


def several(times: int) -> dict[str, list[tuple[float, float]]]:
    """Faults of one run with two EnvRunners and two learners, one after the other."""
    faults = [
        ("SIGKILL of an EnvRunner", "envrunner 0", signal.SIGKILL),
        ("SIGSTOP of an EnvRunner", "envrunner 1", signal.SIGSTOP),
        ("SIGKILL of one of two learners", "learner 0", signal.SIGKILL),
        ("SIGSTOP of one of two learners", "learner 1", signal.SIGSTOP),
    ]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in faults}
    group = ["--envs-per-runner", 32, "--num-learners", 2, "--devices", "fake:2"]
    with _run("cartpole", "--num-env-runners", 2, *group) as (place, _, observer):
        for _ in range(times):
            began = time.monotonic()
            for name, victim, number in faults:
                observer.all_at_work(4)
                process = place.worker(victim)
                hit = observer.recovery(
                    victim.replace(" ", "-"), lambda p=process, n=number: p.send_signal(n)
                )
                found[name].append(hit)
            time.sleep(max(0.0, began + ROUND_SECONDS - time.monotonic()))
    return found


def only_learner(times: int, *options: object) -> list[tuple[float, float]]:
    """Runs with these options, whose only learner is killed."""
    found = []
    for _ in range(times):
        with _run("cartpole", "--num-env-runners", 2, "--checkpoint-seconds", 1, *options) as (
            place,
            _,
            observer,
        ):
            observer.all_at_work(3)
            found.append(observer.recovery("learner-0", place.worker("learner 0").kill))
    return found


def driver(times: int) -> list[tuple[float, float]]:
    """The driver is killed, and the run is resumed at once."""
    found = []
    for _ in range(times):
        with _run("cartpole", "--num-env-runners", 2, "--checkpoint-seconds", 1) as (
            place,
            run,
            observer,
        ):
            observer.all_at_work(3)
            run.process.kill()
            run.process.wait()
            began = time.monotonic()
            place.start("train", "--resume", "run")
            first, _ = observer.until(lambda status: _trained(status) > 0)
            observer.until(lambda status: sum(1 for each in status.workers if each.steps) == 3)
            found.append((first, time.monotonic() - began))
    return found


def cut(times: int) -> list[tuple[float, float]]:
    """All connections are cut for 5 s."""
    found, place = [], Place()
    try:
        with Network() as network:
            run = place.start("driver", "cartpole", *ENDLESS, "--bind", "127.0.0.1:0")
            run.wait_for("waiting for workers at")
            lines = run.output.splitlines()
            address = next(line for line in lines if "waiting for workers at" in line).split()[-1]
            dial_in, bind = ["--driver", network.link(address)], free_address()
            place.start("learner", *dial_in, "--bind", bind, "--advertise", network.link(bind))
            for _ in range(2):
                place.start("envrunner", *dial_in)
            observer = Observer(place.path / "run")
            for _ in range(times):
                observer.all_at_work(3)
                found.append(_cut(network, observer))
    finally:
        place.close()
    return found


def _cut(network: Network, observer: Observer) -> tuple[float, float]:
    began = time.monotonic()
    network.cut()
    last, updates = began, -1
    while time.monotonic() < began + 5:
        status = observer.look()
        if status is not None and (trained := _trained(status)) != updates:
            last, updates = time.monotonic(), trained
        time.sleep(LOOK_SECONDS)
    before = {each.worker_id: each.steps for each in observer.look().workers}  # type: ignore[union-attr]
    network.heal()
    observer.until(lambda status: _trained(status) > updates)
    pause = time.monotonic() - last
    observer.until(
        lambda status: all(each.steps > before[each.worker_id] for each in status.workers)
    )
    return pause, time.monotonic() - began


def lost_with_one_of_four(times: int) -> list[float]:
    """The share of throughput that a run loses while one of four EnvRunners stands still. Slow
    environments, not the processors, limit the throughput."""
    found, victims = [], itertools.cycle(range(4))
    sizes = ["--envs-per-runner", 8, "--fragment-steps", 16, "--batch-size", 480]
    place = Place()
    try:
        place.write("slow.py", SLOW_ENVIRONMENT)
        options = ["--env", "slow:SlowCartPole", *sizes, "--num-env-runners", 4]
        place.start("train", *options, *ENDLESS)
        observer = Observer(place.path / "run")
        for _ in range(times):
            observer.all_at_work(5)
            whole = _rate(observer, 8.0)
            place.worker(f"envrunner {next(victims)}").send_signal(signal.SIGSTOP)
            found.append(1 - _rate(observer, 8.0) / whole)
            observer.until(lambda status: any(each.state != "ready" for each in status.workers))
    finally:
        place.close()
    return found


def _rate(observer: Observer, seconds: float) -> float:
    """Trained steps a second."""
    counted = []
    for wait in (seconds, 0.0):
        status = observer.look()
        assert status is not None
        counted.append((time.monotonic(), _trained(status)))
        time.sleep(wait)
    (begin, before), (end, after) = counted
    return (after - before) / (end - begin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    measured = several(times)
    measured["SIGKILL of the only learner"] = only_learner(times)
    measured["SIGKILL of the driver, and `juggler train --resume`"] = driver(times)
    measured["all connections cut for 5 s"] = cut(times)
    rows = []
    for name, found in measured.items():
        cells = [
            f"**{statistics.median(values):.1f}** ({max(values):.1f})"
            for values in zip(*found, strict=True)
        ]
        rows.append([name, *cells])
    head = ["fault", "without an update, s: median (worst)", "to full strength, s"]
    print(f"On {machine()}.\n\n" + table("Recovery", head, rows), flush=True)
    lost = lost_with_one_of_four(times)
    print(
        f"While one of four EnvRunners stands still: {statistics.median(lost):.0%} of the steps a "
        f"second are lost ({min(lost):.0%} to {max(lost):.0%}); its share is 25%."
    )


if __name__ == "__main__":
    main()
