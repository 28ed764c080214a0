"""Measures the parts of a run on this machine: the very parts, in one process."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from threading import Semaphore
from typing import Any

import torch

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.trial_modules import build_one
from juggler.driver.trial_steps import in_time
from juggler.driver.trial_updates import Built
from juggler.driver.trial_updates import sampler as sampler_of
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.multi_agent.turns import AgentGroup
from juggler.envrunner.process import numpy_in_one_thread
from juggler.experiments.tuning.speeds import MOST_RUNNERS, Sampling, Speeds, Transport, Updating
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.learner import Learner
from juggler.learner.process.devices import device_for, devices_here
from juggler.runtime.actors.endpoints import bind, make_server
from juggler.runtime.actors.memory import keep_freed_memory
from juggler.runtime.actors.processor_time import seconds_used, thread_waited
from juggler.runtime.actors.resources import usable_cores, usable_memory
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules.by_name import given_or_named
from juggler.runtime.nearest import one_of
from juggler.runtime.streams.episodes import EpisodeReceiver, EpisodeSender
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.trees import flatten
from juggler.runtime.wire.v1 import episodes_pb2

_IN_FLIGHT = 4  # batches
_SENT_SECONDS = 30.0  # for a batch to arrive


def seconds_to_send(batch: EpisodeBatch, seconds: float) -> float:
    """CPU seconds of both ends, which are in this process, for a batch over a Unix socket.

    Args:
        batch: is sent again and again.
        seconds: for how long.

    Raises:
        ConfigError: it does not arrive.
    """
    with tempfile.TemporaryDirectory(prefix="juggler-tune-") as directory:
        return _sent(f"unix:{Path(directory) / 'learner.sock'}", batch, seconds)


def _sent(address: str, batch: EpisodeBatch, seconds: float) -> float:
    free, problems = Semaphore(_IN_FLIGHT), [""]

    def settled(_: int, reason: str, why: str) -> None:
        problems[0] = problems[0] or f"{reason} {why}".strip()
        free.release()

    receiver = EpisodeReceiver(lambda frame: "", lambda metadata: None, Limits())
    server = make_server(2)
    server.add_generic_rpc_handlers((receiver.handler(),))
    bind(server, address)
    server.start()
    sender = EpisodeSender(address, (), settled)
    tree = {DEFAULT_MODULE: batch.to_tree()}
    try:
        count, began, used = 0, 0.0, 0.0
        while count <= _IN_FLIGHT or time.perf_counter() - began < seconds:
            if not free.acquire(timeout=_SENT_SECONDS):
                raise ConfigError(f"a batch did not arrive within {_SENT_SECONDS:g} s on {address}")
            if problems[0]:
                raise ConfigError(f"a batch was not taken: {problems[0]}")
            count += 1
            if count == _IN_FLIGHT:  # the stream is open
                began, used = time.perf_counter(), time.process_time()
            sender.send(episodes_pb2.BatchHeader(batch_id=count), tree)
        return (time.process_time() - used) / (count - _IN_FLIGHT)
    finally:
        sender.close()
        server.stop(1.0).wait()


Tell = Callable[[str], None]

_ENVIRONMENTS = (1, 4, 16, 64, 256)
_OF_BATCH_SIZE = (0.25, 0.5, 1, 2, 4, 8)
_THREADS = (1, 2, 4, 8)  # of a learner
_AT_ONCE = 4  # processes of environments for each core
_MORE_SECONDS = 30.0  # that environments may take, to be made, too
_SHORT = 8  # steps of a fragment where the configuration's would take too long
_ALONE = 0.9  # of a core
_MEMORY_OF_RUNNER = 150 << 20  # bytes, without its environments


class Measurements:
    """Measures one part after the other.

    Args:
        config: of a run with one agent, complete.
        seconds: for all measurements together, about.
        tell: called with each figure, for people.
        does: called with what is measured next.
    """

    def __init__(self, config: RunConfig, seconds: float, tell: Tell, does: Tell) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)  # as in workers
        numpy_in_one_thread()
        self._config, self._seconds = config, seconds
        self._tell, self._does = tell, does
        self._batches: dict[int, EpisodeBatch] = {}  # by number of environments

    def all(self) -> Speeds:
        """
        Raises:
            EnvironmentFailed: an environment failed.
            NonFinite: it gave numbers that are not finite.
            ConfigError: there is not enough time for one measurement of each part.
        """
        used, waited = time.thread_time(), _waited()
        sampling = self._sampling()
        updating = self._updating()
        used, waited = time.thread_time() - used, _waited() - waited
        share = used / (used + waited) if used else 1.0
        if share < _ALONE:
            self._tell(f"other work: a process that computes gets {share:.0%} of a core")
        memory = usable_memory()
        most = MOST_RUNNERS if memory is None else max(1, memory // _MEMORY_OF_RUNNER)
        return Speeds(usable_cores(), share, most, sampling, updating, self._transport())

    # -- EnvRunners -------------------------------------------------------------------------------

    def _sampling(self) -> list[Sampling]:
        own, name = self._config.env_runner.envs_per_runner, self._config.env_runner.env
        counts = sorted({*_ENVIRONMENTS, own})
        if self._config.env_runner.vectorize == "async":  # each is a process
            counts = [count for count in counts if count <= max(own, _AT_ONCE * usable_cores())]
        each = 0.5 * self._seconds / len(counts)
        limit = 0.5 * self._seconds + _MORE_SECONDS
        found: list[Sampling] = []
        for count in counts:
            # Larger vectors would take longer still.
            if found and _predicted(found, count) * _SHORT > 2 * each:
                break
            self._does(f"making steps of {name} with {_many(count)}")
            sample = partial(self._add_sampling, found, count, each)
            if not in_time(sample, limit):
                break
            self._tell(_told(found[-1]))
        if not found:
            raise ConfigError(
                f"{name}: making {_many(counts[0])} and {_SHORT} steps takes longer than "
                f"{limit:g} s: give more --seconds"
            )
        if left_out := [f"{count}" for count in counts[len(found) :]]:
            self._tell(
                f"left out: EnvRunners with {one_of(left_out)} environments, which take too long "
                "for this: give more --seconds to measure them"
            )
        return found

    def _add_sampling(self, found: list[Sampling], count: int, seconds: float) -> None:
        found.append(self._sampling_with(count, seconds))

    def _sampling_with(self, count: int, seconds: float) -> Sampling:
        runner = replace(self._config.env_runner, envs_per_runner=count)
        env = make_vector_env(runner)
        try:
            if not self._batches:
                self._built = _build(self._config, env)
            return self._sampled(env, count, seconds)
        finally:
            env.close()

    def _sampled(self, env: VectorEnvironment, count: int, seconds: float) -> Sampling:
        built, steps = self._built, self._config.env_runner.fragment_steps
        pids = [each.pid for each in getattr(env.unwrapped, "processes", ())]
        sampler, began = sampler_of(built, env, min(steps, _SHORT)), time.perf_counter()
        fragment = sampler.sample((0, 0))  # the first one takes longer
        if (time.perf_counter() - began) * steps / _SHORT < seconds / 4:
            sampler = sampler_of(built, env, steps)
            fragment = sampler.sample((0, 0))
        each: list[dict[str, float]] = []
        live, waited, end = 0, _waited(), time.perf_counter() + seconds
        while not each or time.perf_counter() < end:
            began, used = time.perf_counter(), _used(pids)
            fragment = sampler.sample((0, 0))
            wall, cpu = time.perf_counter() - began, _used(pids) - used
            each.append({"wall": wall, "cpu": cpu, **fragment.seconds})
            live += fragment.batch.live_steps
        self._batches[count] = fragment.batch
        steps = fragment.batch.steps
        usual = usual_seconds(each, _waited() - waited)
        return Sampling(
            count,
            usual["wall"] / steps,
            usual["cpu"] / steps,
            usual["environment"] / steps,
            usual["inference"] / steps,
            live / (len(each) * steps * count),
        )

    # -- the learner ------------------------------------------------------------------------------

    def _updating(self) -> list[Updating]:
        config = self._config
        learner = self._built.learner
        wanted = sorted({max(1, round(config.learner.batch_size * k)) for k in _OF_BATCH_SIZE})
        threads = self._threads()
        each = 0.4 * self._seconds / len(wanted) / len(threads)
        found: list[Updating] = []
        for steps in wanted:
            slowest = max((each.seconds for each in found[-len(threads) :]), default=0.0)
            too_long = bool(found) and slowest * steps / found[-1].steps > 2 * each
            if too_long and steps > config.learner.batch_size:
                self._tell(
                    f"left out: updates of {steps} steps and more, which take too long for this: "
                    "give more --seconds to measure them"
                )
                break
            batches = self._batches_of(steps)
            live = sum(batch.live_steps for batch in batches)
            if found and live <= found[-1].steps:
                continue  # no smaller batch was sampled
            self._does(f"making updates of {live} steps")
            for count in threads:
                torch.set_num_threads(count)
                found.append(self._updated(learner, batches, live, each))
                self._tell(_told_update(found[-1]))
        torch.set_num_threads(1)
        return found

    def _threads(self) -> list[int]:
        """Numbers of threads to make updates with: on a GPU they change nothing."""
        own = self._config.driver.learner_threads
        if self._built.learner.device.type != "cpu":
            return [own]
        cores = max(1.0, usable_cores() / self._config.driver.learners)  # of each
        return sorted({own, *(count for count in _THREADS if count <= cores)})

    def _batches_of(self, steps: int) -> list[EpisodeBatch]:
        """The largest batches that fit into an update of so many steps, as often as it has."""
        by_size = sorted(self._batches.values(), key=lambda batch: batch.live_steps)
        batch = by_size[0]
        for larger in by_size:
            if 0 < larger.live_steps <= 1.1 * steps:
                batch = larger
        return [batch] * max(1, round(steps / max(1, batch.live_steps)))

    def _updated(
        self, learner: Learner, batches: list[EpisodeBatch], live: int, seconds: float
    ) -> Updating:
        def update() -> Mapping[str, Any]:
            return fetch_metrics(learner.update_from_episodes(batches))  # waits for the device

        began = time.perf_counter()
        while not update():  # a replay is filled up first
            if time.perf_counter() - began > self._seconds:
                raise ConfigError(
                    f"the learner has not made an update within {self._seconds:g} s: give more "
                    "--seconds, or a smaller replay_begin"
                )
        walls: list[float] = []
        cpus: list[float] = []
        end = time.perf_counter() + seconds
        while not walls or time.perf_counter() < end:
            began, used = time.perf_counter(), time.process_time()
            update()
            walls.append(time.perf_counter() - began)
            cpus.append(time.process_time() - used)
        return Updating(live, median(walls), median(cpus), torch.get_num_threads())

    # -- between them -----------------------------------------------------------------------------

    def _transport(self) -> Transport:
        """The smallest and the largest batch, over a Unix socket, both ends in this process."""
        by_size = sorted(self._batches.values(), key=lambda batch: batch.live_steps)
        small, large = by_size[0], by_size[-1]
        each = 0.05 * self._seconds
        self._does("sending batches")
        of_small, of_large = (seconds_to_send(batch, each) for batch in (small, large))
        more = max(1, large.live_steps - small.live_steps)
        per_step = max(0.0, of_large - of_small) / more
        seconds = max(0.0, of_small - per_step * small.live_steps)
        bytes_per_step = _bytes(large) / max(1, large.live_steps)
        self._tell(
            f"sending a batch of {large.live_steps} steps, {_bytes(large) / 1e3:.0f} KB: "
            f"{of_large * 1e3:.2f} ms of CPU at both ends"
        )
        return Transport(bytes_per_step, seconds, per_step)


def usual_seconds(fragments: Sequence[Mapping[str, float]], waited: float) -> dict[str, float]:
    """What a fragment takes when other work does not disturb it.

    Other work disturbs some fragments, and less so the median. But the median does not see what
    takes long in a few of them, as slow resets do; the mean sees it, without the time for which
    the thread waited for a core.

    Args:
        fragments: the seconds of each by part, of which "wall" is the whole and "cpu" processor
            time, which other work hardly changes.
        waited: seconds for which the thread could have computed, and waited for a core.
    """
    undisturbed = max(0.0, 1 - waited / sum(found["wall"] for found in fragments))
    usual = {}
    for name in fragments[0]:
        each = [found[name] for found in fragments]
        usual[name] = max(median(each), undisturbed * fmean(each))
    usual["cpu"] = fmean(found["cpu"] for found in fragments)
    return usual


def _build(config: RunConfig, env: VectorEnvironment) -> Built:
    group = AgentGroup((), env.single_observation_space, env.single_action_space)
    module = given_or_named(config.module.module, None, {})
    device = device_for(config.driver.device_names()[0], 0, devices_here())
    return build_one(config, group, None, module, {}, device)


def _waited() -> float:
    """Seconds for which this thread could have computed, and waited for a core."""
    return thread_waited(os.getpid(), threading.get_native_id())


def _used(pids: Sequence[int]) -> float:
    """CPU seconds of this process and of others."""
    return time.process_time() + (seconds_used(pids) if pids else 0.0)


def _bytes(batch: EpisodeBatch) -> int:
    return sum(array.nbytes for _, array in flatten(batch.to_tree()))


def _predicted(found: list[Sampling], count: int) -> float:
    """Seconds for a step of so many environments, from the growth so far."""
    last = found[-1]
    before = found[-2] if len(found) > 1 else Sampling(0, 0.0, 0.0, 0.0, 0.0, 1.0)
    slope = (last.seconds - before.seconds) / (last.environments - before.environments)
    return last.seconds + max(0.0, slope) * (count - last.environments)


def _told(found: Sampling) -> str:
    rate = found.environments * found.live / found.seconds
    return (
        f"an EnvRunner with {_many(found.environments)}: "
        f"{rate:,.0f} steps/s "
        f"(environments {found.environment / found.seconds:.0%}, "
        f"inference {found.inference / found.seconds:.0%})"
    )


def _many(environments: int) -> str:
    return f"{environments} environment{'s'[: environments > 1]}"


def _told_update(found: Updating) -> str:
    rate = found.steps / found.seconds
    return (
        f"an update of {found.steps} steps in {found.threads} thread{'s'[: found.threads > 1]}: "
        f"{found.seconds * 1e3:.1f} ms, {rate:,.0f} steps/s"
    )
