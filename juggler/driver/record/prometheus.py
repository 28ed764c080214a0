"""A run for Prometheus: what its status says, as metrics, on /metrics."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from juggler.driver.record.metrics_server import MetricsServer
from juggler.runtime.actors.endpoints import EndpointError, is_loopback, split_address
from juggler.runtime.actors.tls import Tls
from juggler.runtime.wire.v1 import status_pb2

#: States of workers whose process is not there.
GONE = ("left", "restarting", "down")


def serve_metrics(
    address: str,
    read: Callable[[], status_pb2.RunStatus],
    *,
    token: str = "",
    tls: Tls | None = None,
    insecure: bool = False,
) -> Callable[[], None]:
    """Serve /metrics in a thread.

    Args:
        address: "host:port".
        read: the run's status; called for each scrape.
        token: that has to be shown; "": none.
        tls: of this host; None: plain HTTP.
        insecure: other machines may read it even without TLS or without a token.

    Returns:
        What ends it.

    Raises:
        EndpointError: it cannot or must not listen there.
    """
    host, port = split_address(address)
    if not (insecure or is_loopback(host) or (token and tls)):
        lacking = "there is no token" if tls else "nothing would be encrypted"
        raise EndpointError(
            f"refusing to serve metrics on {address}: other machines could read them, and "
            f"{lacking}. Give `juggler driver` --tls and a token; or pass --insecure on a network "
            "that you trust; or bind to 127.0.0.1"
        )
    registry = CollectorRegistry()
    registry.register(_RunCollector(read))
    ProcessCollector(registry=registry)  # the driver's CPU time, memory and descriptors
    try:
        server = MetricsServer(host, port, make_wsgi_app(registry), token, tls)
    except OSError as error:
        raise EndpointError(f"cannot serve metrics on {address}: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return close


class _RunCollector(Collector):
    def __init__(self, read: Callable[[], status_pb2.RunStatus]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        try:
            status = self._read()
        except TimeoutError:
            yield _gauge("driver_answers", "1; 0 where its loop does not come round", 0)
            return
        yield _gauge("driver_answers", "1; 0 where its loop does not come round", 1)
        yield from families(status)


def families(status: status_pb2.RunStatus) -> Iterator[Metric]:
    """A run's status as metrics. Counters are those that only grow within a driver's process, but
    for steps that a learner which is back had trained on, and that were dropped as lost with it."""
    about = {(status.env, status.algorithm, status.run_id): 1}
    yield _gauge("run", "What is trained; always 1", about, ("env", "algorithm", "run"))
    yield _gauge("wall_seconds", "Time that the run has taken", status.wall_seconds)
    yield _counter("updates", "Updates that made new weights", status.updates)
    yield _counter("restarts", "Processes that took the place of others", status.restarts)
    yield _gauge("weights_generation", "Of the newest weights", status.version.generation)
    yield _gauge("weights_update", "Of the newest weights", status.version.update)
    yield from _steps(status.steps)
    yield from _queues(status.queues)
    yield from _episodes(status.episodes)
    for name, text, histogram in (
        ("staleness_updates", "Of batches that were trained on", status.staleness),
        ("receipt_seconds", "From a sample request to its receipt", status.receipt_seconds),
        ("update_seconds", "From an update's issue to a learner's answer", status.update_seconds),
    ):
        yield _histogram(name, text, histogram)
    yield from _workers(status.workers)


def _steps(steps: status_pb2.StepBooks) -> Iterator[Metric]:
    dropped = {(reason,): count for reason, count in steps.dropped.items()}
    yield _counter("env_steps_sampled", "Live environment steps", steps.sampled)
    yield _counter("env_steps_trained", "Steps trained on, counted once", steps.trained)
    yield _counter("env_steps_dropped", "Steps never trained on", dropped, ("reason",))
    yield _gauge("env_steps_in_flight", "Sampled, neither trained nor dropped", steps.in_flight)
    yield _gauge("env_steps_lost_unreported", "Asked of the dead", steps.lost_unreported)


def _queues(queues: status_pb2.Queues) -> Iterator[Metric]:
    yield _gauge("requests_in_flight", "Sample requests", queues.requests_in_flight)
    yield _gauge("updates_in_flight", "Updates issued", queues.updates_in_flight)
    yield _gauge("held_batches", "At learners, in no update yet", queues.held_batches)
    yield _gauge("held_steps", "The steps of those", queues.held_steps)


def _episodes(episodes: status_pb2.RunStatus.Episodes) -> Iterator[Metric]:
    yield _counter("episodes", "Training episodes that ended", episodes.ended)
    for field, text in (
        ("return_mean", "Over the last 100 episodes"),
        ("length_mean", "Over the last 100 episodes"),
        ("evaluation_return_mean", "Of the newest evaluation"),
    ):
        if episodes.HasField(field):
            yield _gauge(f"episode_{field}", text, getattr(episodes, field))


def _workers(workers: Sequence[status_pb2.WorkerStatus]) -> Iterator[Metric]:
    states = Counter((each.role, each.state) for each in workers)
    ready = {(role,): states[role, "ready"] for role, _ in states}
    yield _gauge("workers", "Worker ids there have been", states, ("role", "state"))
    yield _gauge("workers_ready", "Those that can work now", ready, ("role",))
    of = ("worker",)
    for name, text, values in (
        ("worker_steps", "Sampled, or trained on", {(w.worker_id,): w.steps for w in workers}),
        ("worker_restarts", "By worker id", {(w.worker_id,): w.restarts for w in workers}),
    ):
        yield _counter(name, text, values, of)
    seconds = {
        (each.worker_id, activity): spent
        for each in workers
        for activity, spent in each.seconds.items()
    }
    yield _counter("worker_seconds", "Where the time went", seconds, ("worker", "activity"))
    counts = {
        (each.worker_id, name): count for each in workers for name, count in each.counts.items()
    }
    yield _counter("worker_counts", "What a gateway has counted", counts, ("worker", "name"))
    here = [each for each in workers if each.state not in GONE]
    resident = {(w.worker_id,): w.resources.resident_bytes for w in here}
    device = {(w.worker_id,): w.resources.device_bytes for w in here}
    silent = {(w.worker_id,): w.seconds_silent for w in here}
    update = {(w.worker_id,): w.version.update for w in here}
    yield _gauge("worker_resident_bytes", "Memory of the process", resident, of)
    yield _gauge("worker_device_bytes", "Memory of its device that it has", device, of)
    yield _gauge("worker_silent_seconds", "Since it was last heard", silent, of)
    yield _gauge("worker_weights_update", "That it acts with, or made", update, of)


_Values = float | Mapping[Any, float]  # by the labels' values


def _gauge(name: str, text: str, values: _Values, labels: Sequence[str] = ()) -> Metric:
    family = GaugeMetricFamily(f"juggler_{name}", text, labels=labels)
    for own, value in _items(values):
        family.add_metric(own, value)
    return family


def _counter(name: str, text: str, values: _Values, labels: Sequence[str] = ()) -> Metric:
    family = CounterMetricFamily(f"juggler_{name}", text, labels=labels)
    for own, value in _items(values):
        family.add_metric(own, value)
    return family


def _items(values: _Values) -> list[tuple[tuple[str, ...], float]]:
    return [*values.items()] if isinstance(values, Mapping) else [((), values)]


def _histogram(name: str, text: str, histogram: status_pb2.Histogram) -> Metric:
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
    family = HistogramMetricFamily(f"juggler_{name}", text)
    family.add_metric((), buckets, histogram.sum)
    return family
