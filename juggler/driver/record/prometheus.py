"""Serves a run's status as Prometheus metrics on /metrics."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

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


@contextmanager
def serve_metrics(
    address: str,
    read: Callable[[], status_pb2.RunStatus],
    *,
    token: str = "",
    tls: Tls | None = None,
    insecure: bool = False,
) -> Iterator[None]:
    """Serve /metrics in a thread during the `with` block.

    Args:
        read: reads the run's status; called for each scrape.
        token: the bearer token that clients must send; "": none.
        tls: of this host; clients then need a certificate of its authority. None: plain HTTP.
        insecure: allow other machines to read even without TLS or a token.

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
    def __init__(self, read: Callable[[], status_pb2.RunStatus]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        status = None
        with suppress(TimeoutError):
            status = self._read()
        yield _GAUGE("juggler_driver_up", _UP, value=int(status is not None))
        yield from families(status) if status is not None else ()


_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
#: Kind, name and text of a metric, and its field in a message. If that is a map, also its label.
_Table = tuple[tuple[_Family, str, str, str] | tuple[_Family, str, str, str, str], ...]
_RUN: Final[_Table] = (
    (_GAUGE, "wall_seconds", "Duration of the run", "wall_seconds"),
    (_COUNTER, "updates", "Updates that made new weights", "updates"),
    (_COUNTER, "restarts", "Processes that replaced others", "restarts"),
    (_GAUGE, "weights_generation", "Generation of the newest weights", "version.generation"),
    (_GAUGE, "weights_update", "Update of the newest weights", "version.update"),
    (_COUNTER, "env_steps_sampled", "Live environment steps", "steps.sampled"),
    (_COUNTER, "env_steps_trained", "Steps trained on, counted once", "steps.trained"),
    (_COUNTER, "env_steps_dropped", "Steps never trained on", "steps.dropped", "reason"),
    (_GAUGE, "env_steps_in_flight", "Steps sampled and not yet used", "steps.in_flight"),
    (
        _GAUGE,
        "env_steps_lost_unreported",
        "Steps requested from dead workers",
        "steps.lost_unreported",
    ),
    (_GAUGE, "requests_in_flight", "Open sample requests", "queues.requests_in_flight"),
    (_GAUGE, "updates_in_flight", "Updates issued, not answered", "queues.updates_in_flight"),
    (_GAUGE, "queued_batches", "Batches waiting at learners", "queues.queued_batches"),
    (_GAUGE, "queued_steps", "Steps of these batches", "queues.queued_steps"),
    (_COUNTER, "episodes", "Training episodes that ended", "episodes.ended"),
    (_GAUGE, "episode_return_mean", "Mean of the last 100 returns", "episodes.return_mean"),
    (_GAUGE, "episode_length_mean", "Mean of the last 100 lengths", "episodes.length_mean"),
    (
        _GAUGE,
        "episode_evaluation_return_mean",
        "Mean return of the newest evaluation",
        "episodes.evaluation_return_mean",
    ),
)
_MODULE: Final[_Table] = (
    (_GAUGE, "module_return_mean", "Mean of its agents' last 100 returns", "return_mean"),
    (_COUNTER, "module_steps_played", "Steps of a module that is not trained", "steps_played"),
)
_TRAINED_MODULE: Final[_Table] = (
    (_COUNTER, "module_steps_sampled", "Live steps of its agents", "steps.sampled"),
    (_COUNTER, "module_steps_trained", "Of these, trained on, counted once", "steps.trained"),
    (_COUNTER, "module_steps_dropped", "Of these, never trained on", "steps.dropped", "reason"),
    (_GAUGE, "module_steps_in_flight", "Of these, not used yet", "steps.in_flight"),
    (_GAUGE, "module_weights_update", "Update of its newest weights", "version.update"),
)
_AGENT: Final[_Table] = (
    (_COUNTER, "agent_episodes", "Training episodes in which the agent acted", "episodes"),
    (_GAUGE, "agent_return_mean", "Mean return of its last 100 of these", "return_mean"),
)
_LEAGUE: Final[_Table] = (
    (_GAUGE, "league_players", "Players that can play", "players"),
    (_GAUGE, "league_historical_players", "Of these, frozen ones", "historical"),
)
_PLAYER: Final[_Table] = (
    (_GAUGE, "player_elo", "Elo rating; the mean of all players is 0", "elo"),
    (_GAUGE, "player_win_rate", "Win rate against all opponents together", "win_rate"),
    (_GAUGE, "player_nash", "Probability in the Nash equilibrium of all players", "nash"),
    (_COUNTER, "player_steps", "Steps that the player was trained on", "steps"),
    (_COUNTER, "player_copies", "Copies of the player", "copies"),
    (_COUNTER, "player_resets", "Number of resets of the player", "resets"),
)
_WORKER: Final[_Table] = (
    (_COUNTER, "worker_steps", "Steps sampled or trained", "steps"),
    (_COUNTER, "worker_restarts", "Restarts", "restarts"),
    (_COUNTER, "worker_seconds", "Time by activity", "seconds", "activity"),
    (_COUNTER, "worker_counts", "A gateway's counters", "counts", "name"),
)
_WORKER_HERE: Final[_Table] = (
    (_GAUGE, "worker_resident_bytes", "Memory of the process", "resources.resident_bytes"),
    (_GAUGE, "worker_device_bytes", "Device memory of the process", "resources.device_bytes"),
    (_GAUGE, "worker_silent_seconds", "Time since its last message", "seconds_silent"),
    (_GAUGE, "worker_weights_update", "Update of its weights", "version.update"),
)
_GATEWAY: Final[_Table] = (
    (_GAUGE, "gateway_simulators", "Simulators that are connected", "simulators.connected"),
    (_GAUGE, "gateway_environments", "Environments of these simulators", "simulators.environments"),
)
_HISTOGRAMS: Final = {
    "staleness": ("staleness_updates", "Staleness of trained batches"),
    "sample_request_seconds": ("sample_request_seconds", "From a sample request to its receipt"),
    "update_seconds": ("update_seconds", "From an update's command to its answer"),
}


def families(status: status_pb2.RunStatus) -> Iterator[Metric]:
    """Convert a run's status to metrics.

    Counters only grow within a driver's process, with one exception: steps of a lost learner count
    as dropped, and as trained once the learner is back with them.
    """
    labels = "env", "algorithm", "run"
    run = _GAUGE("juggler_run", "Environment and algorithm; always 1", labels=labels)
    run.add_metric((status.env, status.algorithm, status.run_id), 1)
    yield run
    yield from _metrics(_RUN, [status])
    # A frozen player is played and never trained, so these counters would stay 0.
    trained = [each for each in status.modules if not each.HasField("steps_played")]
    yield from _metrics(_MODULE, status.modules, "module", "module_id")
    yield from _metrics(_TRAINED_MODULE, trained, "module", "module_id")
    yield from _metrics(_AGENT, status.agents, "agent", "agent")
    if status.HasField("league"):
        yield from _metrics(_LEAGUE, [status.league])
        yield from _metrics(_PLAYER, status.league.learning, "player", "player_id")
    # Prometheus wants the counts up to each bound, and messages have those between bounds.
    for field, (name, text) in _HISTOGRAMS.items():
        histogram = getattr(status, field)
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
        family = HistogramMetricFamily(f"juggler_{name}", text)
        family.add_metric((), buckets, histogram.sum)
        yield family
    # By role and state: the sum over a role's states counts its worker ids.
    states = Counter((each.role, each.state) for each in status.workers)
    of_state = _GAUGE("juggler_workers", "Worker ids so far", labels=("role", "state"))
    ready = _GAUGE("juggler_workers_ready", "Workers that are ready", labels=("role",))
    for (role, state), count in states.items():
        of_state.add_metric((role, state), count)
    for role in dict.fromkeys(role for role, _ in states):
        ready.add_metric((role,), states[role, "ready"])
    yield from (of_state, ready)
    # Totals stay when a worker leaves, or they would go down; what a process has now does not.
    here = [each for each in status.workers if each.state not in GONE]
    gateways = [each for each in here if each.HasField("simulators")]
    for table, workers in ((_WORKER, status.workers), (_WORKER_HERE, here), (_GATEWAY, gateways)):
        yield from _metrics(table, workers, "worker", "worker_id")


def _metrics(
    table: _Table, messages: Sequence[Any], label: str = "", field: str = ""
) -> Iterator[Metric]:
    """Yield the metrics of messages, labelled by a field."""
    labels = (label,) if label else ()
    for kind, name, text, path, *of_map in table if messages else ():
        family = kind(f"juggler_{name}", text, labels=(*labels, *of_map))
        for message in messages:
            own = (getattr(message, field),) if field else ()
            value = _value(message, path)
            if of_map:
                for entry, number in value.items():
                    family.add_metric((*own, entry), number)
            elif value is not None:
                family.add_metric(own, value)
        if labels or of_map or family.samples:
            yield family


def _value(message: Any, path: str) -> Any:
    """Return the value of a dotted path of fields; None: not set."""
    *parents, field = path.split(".")
    for each in parents:
        message = getattr(message, each)
    about = message.DESCRIPTOR.fields_by_name[field]
    return None if about.has_presence and not message.HasField(field) else getattr(message, field)
