"""What was measured of a machine, and what follows from it for other sizes. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from juggler.driver.core.room import Room


@dataclass(frozen=True, slots=True)
class Sampling:
    """One EnvRunner, in seconds for a step of all of its environments.

    Attributes:
        environments: N.
        seconds: of wall time.
        cpu: of this process and, with environments in processes, of theirs.
        environment: of wall time, in the environments.
        inference: the same, in the policy.
        live: the share of steps that are learned from; others only reset.
    """

    environments: int
    seconds: float
    cpu: float
    environment: float
    inference: float
    live: float


@dataclass(frozen=True, slots=True)
class Updating:
    """One update, in seconds.

    Attributes:
        steps: live steps in it.
        seconds: of wall time.
        cpu: of this process.
        threads: of the learner.
    """

    steps: int
    seconds: float
    cpu: float
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Transport:
    """One batch from an EnvRunner to a learner.

    Attributes:
        bytes_per_step: of a live step.
        seconds: of CPU, for a batch, both ends together.
        seconds_per_step: of CPU, for each live step in it.
    """

    bytes_per_step: float
    seconds: float
    seconds_per_step: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """All that was measured. Sizes rise.

    Attributes:
        cores: that processes may use.
        share: of a core that a process which computes gets, since other work takes the rest.
        most_runners: that there is memory for.
        sampling: at several numbers of environments.
        updating: at several sizes of an update, each with several numbers of threads.
        transport: between two processes of this host.
    """

    cores: float
    share: float
    most_runners: int
    sampling: Sequence[Sampling]
    updating: Sequence[Updating]
    transport: Transport

    @property
    def free_cores(self) -> float:
        """What other work leaves of them."""
        return self.cores * self.share

    @property
    def wait(self) -> bool:
        """Whether environments wait more than they compute."""
        one = self.sampling[0]
        return one.cpu / self.share < 0.5 * one.seconds  # who is to compute waits for a core, too


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a run may be told.

    Attributes:
        runners: EnvRunner processes.
        environments: of each.
        fragment_steps: steps of each environment in a batch.
        batch_size: live steps in an update.
        threads: of the learner.
    """

    runners: int
    environments: int
    fragment_steps: int
    batch_size: int
    threads: int = 1

    @property
    def fragment(self) -> int:
        """Steps in a batch."""
        return self.environments * self.fragment_steps


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run of these sizes should do.

    Attributes:
        sizes: of the run.
        rate: live steps trained on per second.
        limit: what holds it up, for people.
    """

    sizes: Sizes
    rate: float
    limit: str


#: The driver's CPU time for a batch, in seconds; see "A whole driver" in benchmarks/driver.md.
_DRIVER = 2e-4

T = TypeVar("T", Sampling, Updating)


def expected(speeds: Speeds, sizes: Sizes, *, synchronous: bool) -> Expected:
    """What a run of these sizes should do.

    EnvRunners and the learner work side by side, so the slowest of them decides, or the cores that
    they share. In synchronous runs they take turns.
    """
    n = sizes.environments
    live = _between(speeds.sampling, n, _environments, lambda each: each.live)
    of_batch = sizes.fragment * live  # live steps in it
    sending = speeds.transport.seconds + speeds.transport.seconds_per_step * of_batch
    sampling = _between(speeds.sampling, n, _environments, lambda each: each.seconds)
    sampling_cpu = _between(speeds.sampling, n, _environments, lambda each: each.cpu)
    # Updates have whole batches: one at least, and of every EnvRunner in synchronous runs.
    update = max(float(sizes.batch_size), of_batch * (sizes.runners if synchronous else 1))
    updates = [each for each in speeds.updating if each.threads == sizes.threads]
    updating = _between(updates, update, _steps, lambda each: each.seconds)
    updating_cpu = _between(updates, update, _steps, lambda each: each.cpu)
    per_step = {
        "the EnvRunners": (sizes.fragment_steps * sampling + sending / 2)
        / of_batch
        / sizes.runners,
        "the learner": updating / update + sending / 2 / of_batch,
        "the cores": (
            (sizes.fragment_steps * sampling_cpu + sending + _DRIVER) / of_batch
            + updating_cpu / update
        )
        / speeds.free_cores,
    }
    if synchronous:
        in_turn = per_step["the EnvRunners"] + per_step["the learner"]
        slower = max(("the EnvRunners", "the learner"), key=lambda each: per_step[each])
        if in_turn >= per_step["the cores"]:
            return Expected(sizes, 1 / in_turn, f"{slower}, since they work in turn")
    limit = max(per_step, key=lambda each: per_step[each])
    return Expected(sizes, 1 / per_step[limit], limit)


def advised(
    speeds: Speeds,
    now: Sizes,
    *,
    synchronous: bool,
    open_updates: int,
    learners: int,
    allowed: Callable[[Sizes], bool],
    batch_sizes: Sequence[int],
) -> Expected:
    """The sizes to take: of those that are within a twentieth of the fastest, the fewest processes,
    threads and environments, and fragments as they are now.

    Args:
        speeds: of the machine.
        now: the sizes in the configuration.
        synchronous: whether EnvRunners and learners take turns.
        open_updates: that batches may be open for. Asynchronous runs only.
        learners: that make each update together.
        allowed: whether the algorithm can learn from batches of these sizes.
        batch_sizes: to choose from.
    """
    candidates = [now]
    threads = sorted({each.threads for each in speeds.updating})
    for batch_size in batch_sizes:
        for sampling in speeds.sampling:
            for runners in range(1, _most_runners(speeds, sampling) + 1):
                rows = sampling.environments * (runners if synchronous else 1)  # of an update
                steps = min(now.fragment_steps, int(_ABOUT * batch_size) // rows)
                if steps < min(now.fragment_steps, _LEAST_STEPS):
                    break
                sizes = Sizes(runners, sampling.environments, steps, batch_size)
                room = Room(open_updates, batch_size, learners)
                if not synchronous and runners > room.batches(sizes.fragment):
                    break  # the others would always wait for requests
                if allowed(sizes):
                    candidates += [replace(sizes, threads=count) for count in threads]
    found = [expected(speeds, sizes, synchronous=synchronous) for sizes in candidates]
    fastest = max(each.rate for each in found)
    fast = [each for each in found if each.rate >= 0.95 * fastest]
    if found[0] in fast:
        return found[0]

    def effort(each: Expected) -> tuple[int, int, int]:
        sizes = each.sizes
        other = abs(sizes.fragment_steps - now.fragment_steps)
        return other, sizes.runners + sizes.threads, sizes.runners * sizes.environments

    return min(fast, key=effort)


#: How much larger than an update its batches may be, some steps of which only reset.
_ABOUT = 1.1
#: Shorter fragments bootstrap nearly every return.
_LEAST_STEPS = 8
MOST_RUNNERS = 64


def _most_runners(speeds: Speeds, sampling: Sampling) -> int:
    """As many as keep all cores busy, where environments wait for something else."""
    busy = max(0.02, min(1.0, sampling.cpu / sampling.seconds))
    return max(1, min(MOST_RUNNERS, speeds.most_runners, round(speeds.free_cores / busy)))


def _environments(each: Sampling) -> float:
    return each.environments


def _steps(each: Updating) -> float:
    return each.steps


def _between(
    points: Sequence[T], x: float, at: Callable[[T], float], of: Callable[[T], float]
) -> float:
    """The value at x, on straight lines through those that were measured; in proportion beyond the
    largest, and that of the smallest before it."""
    if x <= at(points[0]):
        return of(points[0])
    if x >= at(points[-1]):
        return of(points[-1]) * x / at(points[-1])
    low, high = next((a, b) for a, b in pairwise(points) if at(a) <= x <= at(b))
    share = (x - at(low)) / (at(high) - at(low))
    return of(low) + share * (of(high) - of(low))
