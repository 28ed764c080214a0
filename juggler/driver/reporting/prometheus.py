"""Serves a run's status as Prometheus metrics on /metrics."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from juggler.driver.reporting.http_server import HttpServer
from juggler.runtime.actors.endpoints import EndpointError, is_loopback, split_address
from juggler.runtime.actors.tls import Tls

GONE = ("left", "restarting", "down")  # states of workers without a process


@contextmanager
def serve_metrics(
    address: str,
    read: Callable[[], Mapping[str, Any]],
    *,
    token: str = "",
    tls: Tls | None = None,
    insecure: bool = False,
) -> Iterator[None]:
    """Serve /metrics in a thread during the `with` block.

    Raises:
        EndpointError: the address cannot be bound, or needs TLS and a token.
    """
    host, port = split_address(address)
    if not (insecure or is_loopback(host) or (token and tls)):
        missing = "there is no token" if tls else "nothing would be encrypted"
        raise EndpointError(
            f"refusing to serve metrics on {address}: other machines could read them, and "
            f"{missing}. Give `juggler driver` --tls and a token; or pass --insecure on a network "
            "that you trust; or bind to 127.0.0.1"
        )
    # Its own registry: a script may serve metrics of its own from the global one.
    registry = CollectorRegistry()
    registry.register(_RunCollector(read))
    ProcessCollector(registry=registry)  # the driver's CPU time, memory and descriptors
    try:
        any_host = bool(token) or insecure
        server = HttpServer(host, port, make_wsgi_app(registry), token, tls, any_host=any_host)
    except OSError as error:
        raise EndpointError(f"cannot serve metrics on {address}: {error.strerror}") from error
    with server.serving("metrics"):
        yield


_UP = "1 if the driver's loop answers within 5 s, else 0"


class _RunCollector(Collector):
    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        status = None
        with suppress(TimeoutError):
            status = self._read()
        yield _GAUGE("juggler_driver_up", _UP, value=int(status is not None))
        yield from families(status) if status is not None else ()


_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily


class _Of(NamedTuple):
    """A metric, and its path in plain data."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    path: str = ""  # "": the name
    label: str = ""  # of the keys, if the value is a map


_RUN: Final = (
    _Of(_GAUGE, "wall_seconds", "Duration of the run", "wall_time"),
    _Of(_COUNTER, "restarts", "Processes that replaced others"),
    _Of(_GAUGE, "weights_generation", "Generation of the newest weights", "weights_version.0"),
    _Of(_GAUGE, "weights_update", "Update of the newest weights", "weights_version.1"),
    _Of(_COUNTER, "env_steps_sampled", "Live environment steps"),
    _Of(_COUNTER, "env_steps_trained", "Steps trained on, counted once"),
    _Of(_COUNTER, "env_steps_dropped", "Steps never trained on", label="reason"),
    _Of(_GAUGE, "env_steps_in_flight", "Steps sampled and not yet used"),
    _Of(_GAUGE, "env_steps_lost_unreported", "Steps requested from dead workers"),
    _Of(_COUNTER, "episodes", "Training episodes that ended"),
    _Of(_GAUGE, "episode_return_mean", "Mean of the last 100 returns"),
    _Of(_GAUGE, "episode_length_mean", "Mean of the last 100 lengths"),
    _Of(_GAUGE, "episode_evaluation_return_mean", "Of evaluations", "evaluation_return_mean"),
    _Of(_GAUGE, "league_players", "Players that can play", "league.players"),
    _Of(_GAUGE, "league_historical_players", "Of these, frozen ones", "league.historical"),
)
_NOW: Final = (
    _Of(_COUNTER, "updates", "Updates that made new weights, in this process"),
    _Of(_GAUGE, "requests_in_flight", "Open sample requests", "queues.requests_in_flight"),
    _Of(_GAUGE, "updates_in_flight", "Updates issued, not answered", "queues.updates_in_flight"),
    _Of(_GAUGE, "queued_batches", "Batches waiting at learners", "queues.queued_batches"),
    _Of(_GAUGE, "queued_steps", "Steps of these batches", "queues.queued_steps"),
)
#: Of each module, agent, player and worker, without this prefix in the path.
_MODULE: Final = (
    _Of(_GAUGE, "return_mean", "Mean of its agents' last 100 returns", "episode_return_mean"),
    _Of(_COUNTER, "steps_played", "Steps of a module that is not trained", "env_steps_played"),
    _Of(_COUNTER, "steps_sampled", "Live steps of its agents", "env_steps_sampled"),
    _Of(_COUNTER, "steps_trained", "Of these, trained on, counted once", "env_steps_trained"),
    _Of(_COUNTER, "steps_dropped", "Never trained on", "env_steps_dropped", "reason"),
    _Of(_GAUGE, "steps_in_flight", "Of these, not used yet", "env_steps_in_flight"),
    _Of(_GAUGE, "weights_update", "Update of its newest weights", "weights_version.1"),
)
_AGENT: Final = (
    _Of(_COUNTER, "episodes", "Training episodes in which the agent acted"),
    _Of(_GAUGE, "return_mean", "Mean return of its last 100 of these", "episode_return_mean"),
)
_PLAYER: Final = (
    _Of(_GAUGE, "elo", "Elo rating; the mean of all players is 0"),
    _Of(_GAUGE, "win_rate", "Win rate against all opponents together"),
    _Of(_GAUGE, "nash", "Probability in the Nash equilibrium of all players"),
    _Of(_COUNTER, "steps", "Steps that the player was trained on"),
    _Of(_COUNTER, "copies", "Copies of the player"),
    _Of(_COUNTER, "resets", "Number of resets of the player"),
)
_WORKER: Final = (
    _Of(_COUNTER, "steps", "Steps sampled or trained"),
    _Of(_COUNTER, "restarts", "Restarts"),
    _Of(_COUNTER, "seconds", "Time by activity", label="activity"),
    _Of(_COUNTER, "counts", "A gateway's counters", label="name"),
)
_WORKER_HERE: Final = (
    _Of(_GAUGE, "resident_bytes", "Memory of the process", "resources.resident_bytes"),
    _Of(_GAUGE, "device_bytes", "Device memory of the process", "resources.device_bytes"),
    _Of(_GAUGE, "silent_seconds", "Time since its last message", "seconds_silent"),
    _Of(_GAUGE, "weights_update", "Update of its weights", "version.update"),
)
_GATEWAY: Final = (
    _Of(_GAUGE, "simulators", "Simulators that are connected", "simulators.connected"),
    _Of(_GAUGE, "environments", "Environments of these simulators", "simulators.environments"),
)
_HISTOGRAMS: Final = {
    "staleness": ("staleness_updates", "Staleness of trained batches"),
    "sample_request_seconds": ("sample_request_seconds", "From a sample request to its receipt"),
    "update_seconds": ("update_seconds", "From an update's command to its answer"),
}


def families(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Convert a run's status to metrics.

    Counters only grow within a driver's process, with one exception: steps of a lost learner count
    as dropped, and as trained once the learner is back with them.
    """
    labels = "env", "algorithm", "run"
    run = _GAUGE("juggler_run", "Environment and algorithm; always 1", labels=labels)
    run.add_metric([status[key] for key in ("env", "algorithm", "run_id")], 1)
    yield run
    line = status["metrics"]
    yield from _metrics(_RUN, {"": line})
    yield from _metrics(_NOW, {"": status})
    yield from _metrics(_MODULE, line.get("by_module", {}), "module")
    yield from _metrics(_AGENT, line.get("by_agent", {}), "agent")
    yield from _metrics(_PLAYER, line.get("league", {}).get("learning", {}), "player")
    # Prometheus wants the counts up to each bound, and messages have those between bounds.
    for field, (name, text) in _HISTOGRAMS.items():
        histogram = status[field]
        bounds = [*map(str, histogram["bounds"]), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(histogram["counts"]), strict=True))
        family = HistogramMetricFamily(f"juggler_{name}", text)
        family.add_metric((), buckets, histogram["sum"])
        yield family
    # By role and state: the sum over a role's states counts its worker ids.
    workers = {each["worker_id"]: each for each in status["workers"]}
    states = Counter((each["role"], each["state"]) for each in workers.values())
    of_state = _GAUGE("juggler_workers", "Worker ids so far", labels=("role", "state"))
    ready = _GAUGE("juggler_workers_ready", "Workers that are ready", labels=("role",))
    for (role, state), count in states.items():
        of_state.add_metric((role, state), count)
    for role in dict.fromkeys(role for role, _ in states):
        ready.add_metric((role,), states[role, "ready"])
    yield from (of_state, ready)
    # Totals stay when a worker leaves, or they would go down; what a process has now does not.
    here = {name: each for name, each in workers.items() if each["state"] not in GONE}
    yield from _metrics(_WORKER, workers, "worker")
    yield from _metrics(_WORKER_HERE, here, "worker")
    yield from _metrics(_GATEWAY, here, "worker", "gateway")


def _metrics(
    table: Sequence[_Of], rows: Mapping[str, Mapping[str, Any]], label: str = "", prefix: str = ""
) -> Iterator[Metric]:
    """Yield the metrics of rows, labelled by their names."""
    for each in table:
        name = "_".join(filter(None, ("juggler", prefix or label, each.name)))
        family = each.kind(name, each.text, labels=[*filter(None, (label, each.label))])
        for row_name, row in rows.items():
            value = _value(row, each.path or each.name)
            if value is None:
                continue  # unknown, or this row has none
            for entry, number in value.items() if each.label else [("", value)]:
                family.add_metric([*filter(None, (row_name, entry))], number)
        if family.samples:
            yield family


def _value(found: Any, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    for each in path.split("."):
        if found is None:
            return None
        found = found[int(each)] if isinstance(found, list) else found.get(each)
    return found
