"""Serves a run's status as Prometheus metrics on /metrics."""

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

from juggler.driver.record.http_server import HttpServer
from juggler.runtime.actors.endpoints import EndpointError, is_loopback, split_address
from juggler.runtime.actors.tls import Tls
from juggler.runtime.wire.v1 import status_pb2

#: States of workers without a process.
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
        read: reads the run's status; called for each scrape.
        token: the bearer token that clients must send; "": none.
        tls: of this host; clients then need a certificate of its authority. None: plain HTTP.
        insecure: allow other machines to read even without TLS or a token.

    Returns:
        A function that stops the server.

    Raises:
        EndpointError: the address cannot be bound, or must not be without TLS and a token.
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
        any_host = bool(token) or insecure
        server = HttpServer(host, port, make_wsgi_app(registry), token, tls, any_host=any_host)
    except OSError as error:
        raise EndpointError(f"cannot serve metrics on {address}: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return close


_UP = "1 if the driver's loop answers within 5 s, else 0"


class _RunCollector(Collector):
    def __init__(self, read: Callable[[], status_pb2.RunStatus]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        try:
            status = self._read()
        except TimeoutError:
            yield _gauge("driver_up", _UP, 0)
            return
        yield _gauge("driver_up", _UP, 1)
        yield from families(status)


def families(status: status_pb2.RunStatus) -> Iterator[Metric]:
    """Convert a run's status to metrics.

    Counters only grow within a driver's process, with one exception: steps dropped as lost with a
    learner count as trained once the learner is back with them.
    """
    about = {(status.env, status.algorithm, status.run_id): 1}
    yield _gauge("run", "Environment and algorithm; always 1", about, ("env", "algorithm", "run"))
    yield _gauge("wall_seconds", "Duration of the run", status.wall_seconds)
    yield _counter("updates", "Updates that made new weights", status.updates)
    yield _counter("restarts", "Processes that replaced others", status.restarts)
    yield _gauge("weights_generation", "Of the newest weights", status.version.generation)
    yield _gauge("weights_update", "Of the newest weights", status.version.update)
    yield from _steps(status.steps, status.queues)
    yield from _modules(status.modules)
    yield from _agents(status.agents)
    if status.HasField("league"):
        yield from _league(status.league)
    yield from _episodes(status.episodes)
    for name, text, histogram in (
        ("staleness_updates", "Staleness of trained batches", status.staleness),
        (
            "sample_request_seconds",
            "From a sample request to its receipt",
            status.sample_request_seconds,
        ),
        ("update_seconds", "From an update's command to its answer", status.update_seconds),
    ):
        yield _histogram(name, text, histogram)
    yield from _workers(status.workers)


def _steps(steps: status_pb2.StepBooks, queues: status_pb2.Queues) -> Iterator[Metric]:
    dropped = {(reason,): count for reason, count in steps.dropped.items()}
    yield _counter("env_steps_sampled", "Live environment steps", steps.sampled)
    yield _counter("env_steps_trained", "Steps trained on, counted once", steps.trained)
    yield _counter("env_steps_dropped", "Steps never trained on", dropped, ("reason",))
    yield _gauge("env_steps_in_flight", "Steps sampled and not yet used", steps.in_flight)
    yield _gauge("env_steps_lost_unreported", "Steps asked of dead workers", steps.lost_unreported)

    yield _gauge("requests_in_flight", "Open sample requests", queues.requests_in_flight)
    yield _gauge(
        "updates_in_flight", "Updates issued and not yet answered", queues.updates_in_flight
    )
    yield _gauge(
        "queued_batches", "Batches that wait at learners for an update", queues.queued_batches
    )
    yield _gauge("queued_steps", "Steps of these batches", queues.queued_steps)


def _modules(modules: Sequence[status_pb2.ModuleStatus]) -> Iterator[Metric]:
    if not modules:
        return
    of = ("module",)
    returns = {(m.module_id,): m.return_mean for m in modules if m.HasField("return_mean")}
    text = "Mean return of its agents' last 100 episodes"
    yield _gauge("module_return_mean", text, returns, of)
    played = {(m.module_id,): m.steps_played for m in modules if m.HasField("steps_played")}
    text = "Steps of the agents of a module that is not trained"
    yield _counter("module_steps_played", text, played, of)
    modules = [each for each in modules if not each.HasField("steps_played")]
    for field, text in (
        ("sampled", "Live steps of the module's agents"),
        ("trained", "Of these, steps trained on, counted once"),
    ):
        steps = {(each.module_id,): getattr(each.steps, field) for each in modules}
        yield _counter(f"module_steps_{field}", text, steps, of)
    dropped = {
        (each.module_id, reason): count
        for each in modules
        for reason, count in each.steps.dropped.items()
    }
    text = "Of these, steps never trained on"
    yield _counter("module_steps_dropped", text, dropped, ("module", "reason"))
    flying = {(each.module_id,): each.steps.in_flight for each in modules}
    yield _gauge("module_steps_in_flight", "Of these, steps not used yet", flying, of)
    updates = {(each.module_id,): each.version.update for each in modules}
    yield _gauge("module_weights_update", "Update of the module's newest weights", updates, of)


def _agents(agents: Sequence[status_pb2.AgentStatus]) -> Iterator[Metric]:
    if not agents:
        return
    of = ("agent",)
    ended = {(each.agent,): each.episodes for each in agents}
    yield _counter("agent_episodes", "Training episodes in which the agent acted", ended, of)
    returns = {(each.agent,): each.return_mean for each in agents if each.HasField("return_mean")}
    yield _gauge("agent_return_mean", "Mean return of its last 100 of these", returns, of)


def _league(league: status_pb2.LeagueStatus) -> Iterator[Metric]:
    yield _gauge("league_players", "Players that can play", league.players)
    yield _gauge("league_historical_players", "Of these, frozen ones", league.historical)
    of, learning = ("player",), league.learning
    ratings = {(each.player_id,): each.elo for each in learning}
    yield _gauge("player_elo", "Elo rating; the mean of all players is 0", ratings, of)
    rates = {(each.player_id,): each.win_rate for each in learning if each.HasField("win_rate")}
    yield _gauge("player_win_rate", "Win rate against all opponents together", rates, of)
    shares = {(each.player_id,): each.nash for each in learning if each.HasField("nash")}
    yield _gauge("player_nash", "Probability in the Nash equilibrium of all players", shares, of)
    for field, text in (
        ("steps", "Steps that the player was trained on"),
        ("copies", "Copies of the player"),
        ("resets", "How often the player began anew"),
    ):
        counts = {(each.player_id,): getattr(each, field) for each in learning}
        yield _counter(f"player_{field}", text, counts, of)


def _episodes(episodes: status_pb2.RunStatus.Episodes) -> Iterator[Metric]:
    yield _counter("episodes", "Training episodes that ended", episodes.ended)
    for field, text in (
        ("return_mean", "Mean return of the last 100 episodes"),
        ("length_mean", "Mean length of the last 100 episodes"),
        ("evaluation_return_mean", "Mean return of the newest evaluation"),
    ):
        if episodes.HasField(field):
            yield _gauge(f"episode_{field}", text, getattr(episodes, field))


def _workers(workers: Sequence[status_pb2.WorkerStatus]) -> Iterator[Metric]:
    states = Counter((each.role, each.state) for each in workers)
    ready = {(role,): states[role, "ready"] for role, _ in states}
    yield _gauge("workers", "Worker ids so far", states, ("role", "state"))
    yield _gauge("workers_ready", "Workers that are ready", ready, ("role",))
    of = ("worker",)
    steps = {(w.worker_id,): w.steps for w in workers}
    restarts = {(w.worker_id,): w.restarts for w in workers}
    yield _counter("worker_steps", "Steps sampled or trained", steps, of)
    yield _counter("worker_restarts", "Restarts", restarts, of)
    seconds = {(w.worker_id, name): spent for w in workers for name, spent in w.seconds.items()}
    yield _counter("worker_seconds", "Time by activity", seconds, ("worker", "activity"))
    counts = {(w.worker_id, name): count for w in workers for name, count in w.counts.items()}
    yield _counter("worker_counts", "A gateway's counters", counts, ("worker", "name"))
    here = [each for each in workers if each.state not in GONE]
    gateways = [each for each in here if each.HasField("simulators")]
    if gateways:
        dialed = {(w.worker_id,): w.simulators.connected for w in gateways}
        theirs = {(w.worker_id,): w.simulators.environments for w in gateways}
        yield _gauge("gateway_simulators", "Simulators that are connected", dialed, of)
        yield _gauge("gateway_environments", "Environments that these have", theirs, of)
    resident = {(w.worker_id,): w.resources.resident_bytes for w in here}
    device = {(w.worker_id,): w.resources.device_bytes for w in here}
    silent = {(w.worker_id,): w.seconds_silent for w in here}
    update = {(w.worker_id,): w.version.update for w in here}
    yield _gauge("worker_resident_bytes", "Memory of the process", resident, of)
    yield _gauge("worker_device_bytes", "Device memory of the process", device, of)
    yield _gauge("worker_silent_seconds", "Time since its last message", silent, of)
    yield _gauge("worker_weights_update", "Update of its weights", update, of)


_Values = float | Mapping[Any, float]  # by the labels' values


def _gauge(name: str, text: str, values: _Values, labels: Sequence[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"juggler_{name}", text, labels=labels), values)


def _counter(name: str, text: str, values: _Values, labels: Sequence[str] = ()) -> Metric:
    return _filled(CounterMetricFamily(f"juggler_{name}", text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: _Values) -> Metric:
    for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric(labels, value)
    return family


def _histogram(name: str, text: str, histogram: status_pb2.Histogram) -> Metric:
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
    family = HistogramMetricFamily(f"juggler_{name}", text)
    family.add_metric((), buckets, histogram.sum)
    return family
