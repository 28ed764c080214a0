"""Serves a driver's status, metrics, health and reflection."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc_health.v1 import health
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from juggler.driver.record.http_server import HttpServer
from juggler.runtime.actors.credentials import bearer, why_not_admitted
from juggler.runtime.actors.endpoints import EndpointError, is_loopback, split_address
from juggler.runtime.actors.health import AsyncHealth, Health, add_reflection
from juggler.runtime.actors.hub import ATTACH_METHOD, Service
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
    yield from _metrics(_RUN, [((), status)])
    modules = [((each.module_id,), each) for each in status.modules]
    trained = [each for each in modules if not each[1].HasField("steps_played")]
    yield from _metrics(_MODULE, modules, "module")
    yield from _metrics(_TRAINED_MODULE, trained, "module")
    agents = [((each.agent,), each) for each in status.agents]
    yield from _metrics(_AGENT, agents, "agent")
    if status.HasField("league"):
        players = [((each.player_id,), each) for each in status.league.learning]
        yield from _metrics(_LEAGUE, [((), status.league)])
        yield from _metrics(_PLAYER, players, "player")
    for part, (name, text) in _HISTOGRAMS.items():
        histogram = getattr(status, part)
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
        family = HistogramMetricFamily(f"juggler_{name}", text)
        family.add_metric((), buckets, histogram.sum)
        yield family
    states = Counter((each.role, each.state) for each in status.workers)
    of_state = _GAUGE("juggler_workers", "Worker ids so far", labels=("role", "state"))
    ready = _GAUGE("juggler_workers_ready", "Workers that are ready", labels=("role",))
    for (role, state), count in states.items():
        of_state.add_metric((role, state), count)
    for role in dict.fromkeys(role for role, _ in states):
        ready.add_metric((role,), states[role, "ready"])
    yield from (of_state, ready)
    workers = [((each.worker_id,), each) for each in status.workers]
    here = [each for each in workers if each[1].state not in GONE]
    yield from _metrics(_WORKER, workers, "worker")
    yield from _metrics(_WORKER_HERE, here, "worker")
    gateways = [each for each in here if each[1].HasField("simulators")]
    yield from _metrics(_GATEWAY, gateways, "worker")


def _metrics(
    table: _Table, messages: Sequence[tuple[tuple[str, ...], Any]], *labels: str
) -> Iterator[Metric]:
    """Yield the metrics of messages, each with the values of its labels."""
    for kind, name, text, path, *of_map in table if messages else ():
        family = kind(f"juggler_{name}", text, labels=(*labels, *of_map))
        for own, message in messages:
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


STATUS_METHOD = "/juggler.v1.Run/Status"
SCALE_METHOD = "/juggler.v1.Run/Scale"
#: Maximum number of workers of a role that can be requested.
MOST_WORKERS = 4096

#: Time limit for the driver's loop to answer.
ANSWER_SECONDS = 5.0

_ATTACH_SERVICE = ATTACH_METHOD.split("/")[1]
_STATUS_SERVICE = STATUS_METHOD.split("/")[1]


@dataclass(frozen=True, slots=True)
class MonitoringOptions:
    """Services for monitoring in addition to the status."""

    metrics_bind: str = ""  # "host:port" of /metrics; "": not served
    health_bind: str = ""  # "host:port" of health for probes without TLS; "": not served
    reflection: bool = False  # whether tools may list the services of the driver's server
    insecure: bool = False  # whether other machines may read /metrics without TLS and a token
    token: str = field(default="", repr=False)  # the token that /metrics requires; "": none
    tls: Tls | None = None  # the driver's TLS files, which /metrics uses; None: plain HTTP


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """A request for the run's status, which the driver's loop answers."""

    answer: Future[status_pb2.RunStatus]


@dataclass(frozen=True, slots=True)
class ScaleAsked:
    """A request for other numbers of local workers; 0: unchanged.

    The answer has the numbers before, or a ValueError.
    """

    env_runners: int
    learners: int
    answer: Future[tuple[int, int]]


class MonitoringServices:
    """Serves a run's status, which the driver's loop answers."""

    def __init__(
        self,
        options: MonitoringOptions,
        token: str,
        ask: Callable[[StatusAsked | ScaleAsked], None],
    ) -> None:
        self._options = options
        self._ask = ask
        self._health, self._health_beside = AsyncHealth(_ATTACH_SERVICE, _STATUS_SERVICE), Health()
        self._open = ExitStack()
        reflection = (_Reflection(),) if options.reflection else ()
        self._token = token
        self.services: tuple[Service, ...] = (self._health, self, *reflection)

    def question(self) -> Future[status_pb2.RunStatus]:
        asked = StatusAsked(Future())
        self._ask(asked)
        return asked.answer

    def start(self) -> None:
        """Bind the addresses of metrics and health checks.

        Raises:
            EndpointError: one of the addresses cannot be bound.
        """
        with ExitStack() as opened:
            if self._options.metrics_bind:
                # Imported here because it imports prometheus_client.
                from juggler.driver.monitoring import serve_metrics

                served = serve_metrics(
                    self._options.metrics_bind,
                    lambda: self.question().result(ANSWER_SECONDS),
                    token=self._options.token,
                    tls=self._options.tls,
                    insecure=self._options.insecure,
                )
                opened.enter_context(served)
            if self._options.health_bind:
                self._health_beside.serve(self._options.health_bind)
                opened.callback(self._health_beside.close)
            self._open = opened.pop_all()

    def ready(self, is_ready: bool) -> None:
        """Set whether health probes report that the driver accepts workers."""
        self._health.ready(is_ready)
        self._health_beside.ready(is_ready)

    def close(self) -> None:
        self._open.close()

    async def add_to(self, server: Any) -> None:
        """Add `juggler.v1.Run` to the hub's server."""
        # A stream, because gRPC would read a unary request before the token is checked.
        status: Any = grpc.stream_stream_rpc_method_handler(
            self._status, response_serializer=status_pb2.RunStatus.SerializeToString
        )
        scale: Any = grpc.stream_stream_rpc_method_handler(
            self._scale, response_serializer=status_pb2.ScaleReply.SerializeToString
        )
        service, status_name = STATUS_METHOD.strip("/").split("/")
        methods = {status_name: status, SCALE_METHOD.rpartition("/")[2]: scale}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))

    async def _status(self, _: Any, context: Any) -> None:
        # Only the driver's own user can open its Unix socket.
        if not context.peer().startswith("unix:"):
            metadata = context.invocation_metadata() or ()
            if (refusal := why_not_admitted(metadata, self._token)) is not None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        await context.write(await _answered(self.question(), context))

    async def _scale(self, requests: Any, context: Any) -> None:
        if not context.peer().startswith("unix:"):
            reason = "a run is scaled from the driver's own host"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        wanted = status_pb2.ScaleRequest()
        async for content in requests:
            wanted.MergeFromString(content)
            break
        if not 1 <= max(wanted.env_runners, wanted.learners) <= MOST_WORKERS:
            numbers = f"{wanted.env_runners} EnvRunners and {wanted.learners} learners"
            reason = f"{numbers}: must be from 1 to {MOST_WORKERS}, or 0 to keep it"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        try:
            asked = ScaleAsked(wanted.env_runners, wanted.learners, Future())
            self._ask(asked)
            env_runners, learners = await _answered(asked.answer, context)
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        else:
            reply = status_pb2.ScaleReply(before=env_runners, learners_before=learners)
            await context.write(reply)


async def _answered(future: Future[Any], context: Any) -> Any:
    """Return the driver's answer, or end the call if it hangs."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_SECONDS)
    except TimeoutError:
        reason = f"the driver's loop has not answered for {ANSWER_SECONDS:.0f} s"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)


class _Reflection:
    async def add_to(self, server: Any) -> None:
        add_reflection(server, (_ATTACH_SERVICE, _STATUS_SERVICE, health.SERVICE_NAME))


def ask_status(channel: grpc.Channel, seconds: float, token: str = "") -> status_pb2.RunStatus:
    """Ask a driver for its run's status.

    Args:
        token: of the run; "": no token, as on the driver's Unix socket.
    """
    method: Any = channel.unary_unary(STATUS_METHOD)
    answer: bytes = method(b"", timeout=seconds, metadata=bearer(token))
    return status_pb2.RunStatus.FromString(answer)


def to_plain(message: Any) -> dict[str, Any]:
    """Convert a message to plain JSON data by field names."""
    plain: dict[str, Any] = {}
    for part in message.DESCRIPTOR.fields:
        value = getattr(message, part.name)
        if part.has_presence and not message.HasField(part.name):
            plain[part.name] = None
        elif part.message_type is None:
            plain[part.name] = list(value) if part.is_repeated else value
        elif part.message_type.GetOptions().map_entry:
            plain[part.name] = dict(value)
        elif part.is_repeated:
            plain[part.name] = [to_plain(each) for each in value]
        else:
            plain[part.name] = to_plain(value)
    return plain
