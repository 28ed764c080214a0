"""OpenTelemetry traces of batches: from the request to the update that learned from them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

from juggler.driver.core import events
from juggler.driver.driver_config import ConfigError
from juggler.runtime.installing import installing

_A_SECOND: Final = 10  # batches that are traced, so that a fast run has no more work with it
_MOST_OPEN: Final = 1000  # batches whose end has not come
_LONG: Final = 300  # characters of a problem
_END_SECONDS: Final = 5.0  # to send the last ones


class Traces(Protocol):
    """What follows batches."""

    def command(self, command: events.Command) -> None:
        """The core wants this."""

    def event(self, event: events.Event) -> None:
        """This has happened."""

    def close(self) -> None:
        """Send what is left."""


class NoTraces:
    """Follows nothing."""

    def command(self, command: events.Command) -> None:
        pass

    def event(self, event: events.Event) -> None:
        pass

    def close(self) -> None:
        pass


def must_be_able_to_trace(to: str) -> None:
    """
    Args:
        to: as for `tracing`.

    Raises:
        ConfigError: the packages of the extra are missing, or the file cannot be written.
    """
    if not to:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ModuleNotFoundError as error:
        what = f"trace = {to!r}: {error.name} is missing"
        raise ConfigError(f"{what}: {installing('tracing')}") from None
    try:
        if not _is_address(to):
            Path(to).open("a").close()
    except OSError as error:
        raise ConfigError(f"trace = {to!r}: cannot write there: {error.strerror}") from error


def tracing(to: str, run: str, tell: Callable[[str], None]) -> Traces:
    """What the key `trace` asks for, once it is known that this can be done.

    Args:
        to: an OTLP endpoint over HTTP, or a file; "": nothing is traced.
        run: the name of the run.
        tell: tells people, once, that traces cannot be sent. The thread that traces calls it.
    """
    if not to:
        return NoTraces()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    exporter: Any
    file: Any = None
    problems = _Problems()
    if _is_address(to):
        exporter = OTLPSpanExporter(endpoint=f"{to.rstrip('/')}/v1/traces")
    else:
        file = Path(to).open("a")  # noqa: SIM115 (`close` closes it)
        exporter = ConsoleSpanExporter(
            out=file, formatter=lambda span: span.to_json(indent=None) + "\n"
        )
    resource = Resource.create({"service.name": "juggler", "juggler.run": run})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def end() -> None:
        provider.force_flush()
        provider.shutdown()
        if file is not None:
            with suppress(OSError):  # a full disk, as was told
                file.close()

    def close() -> None:
        # An endpoint that does not answer is tried again for ten seconds, with every 512 spans.
        ending = threading.Thread(target=end, name="last traces", daemon=True)
        ending.start()
        ending.join(_END_SECONDS)
        if ending.is_alive():
            exporter.shutdown()  # what it has not sent is lost, as it will log
        else:
            problems.close()

    def look() -> None:
        if problem := problems.new():
            done, advice = ("written", "") if file else ("sent", ": is a collector running?")
            text = f"trace = {to!r}: traces cannot be {done} there, and are lost meanwhile"
            tell(f"{text} ({problem}){advice}")

    return BatchTraces(provider.get_tracer("juggler"), close, look=look)


def _is_address(to: str) -> bool:
    return to.startswith(("http://", "https://"))


class _Problems(logging.Handler):
    """Takes what OpenTelemetry logs while traces are sent, which it would print again and again."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._first = ""
        self._told = False
        self._logger = logging.getLogger("opentelemetry")
        self._before = self._logger.propagate
        self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        if record.getMessage().startswith("Exporter already shutdown"):
            return  # as a run that has ended wants it
        said = (str(cause or "") or record.getMessage()).partition("\n")[0]
        self._first = self._first or said[:_LONG]

    def new(self) -> str:
        """The first problem, the first time that this is called after it; else ""."""
        if self._told or not self._first:
            return ""
        self._told = True
        return self._first

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._before
        super().close()


@dataclass(slots=True)
class _Batch:
    """A batch on its way.

    Attributes:
        attributes: of its trace.
        moments: when what happened, in nanoseconds since 1970, in order.
    """

    attributes: dict[str, str | int]
    moments: dict[str, int] = field(default_factory=dict)


class BatchTraces:
    """A trace for each of at most ten batches a second, once it has ended: the span `batch`, and in
    it `sample` (until the first report that it is there), `wait` (for its update) and `update`,
    whose weights are published at its end.

    Args:
        tracer: of OpenTelemetry.
        close: sends what is left.
        now: nanoseconds since 1970.
        look: called every now and then; tells people of problems.
    """

    def __init__(
        self,
        tracer: Any,
        close: Callable[[], None],
        now: Callable[[], int] = time.time_ns,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._tracer, self._close, self._now, self._look = tracer, close, now, look
        self._open: dict[int, _Batch] = {}  # by id; the oldest is the first
        self._second, self._begun = 0, 0

    def command(self, command: events.Command) -> None:
        match command:
            case events.Request():
                self._requested(command)
            case events.IssueUpdate():
                for share in command.shares:
                    for batch_id in share.batch_ids:
                        self._note(batch_id, "issued")

    def event(self, event: events.Event) -> None:
        match event:
            case events.Arrived():
                self._note(event.batch_id, "sampled", steps=event.live_steps)
            case events.SampleReceived():
                self._note(event.batch_id, "sampled", steps=event.live_steps)
                if event.dropped:
                    self._ended(event.batch_id, event.dropped)
            case events.SampleFailed():
                self._ended(event.batch_id, "failed")
            case events.UpdateFinished():
                for used in event.used:
                    outcome = used.dropped or "trained"
                    more = {"staleness": used.staleness, "update": event.version.update}
                    self._ended(used.batch_id, outcome, **more)

    def close(self) -> None:
        with suppress(Exception):  # the run has ended, and has all else on the disk
            self._close()
        self._look()

    def _requested(self, request: events.Request) -> None:
        now = self._now()
        if now // 10**9 != self._second:
            self._second, self._begun = now // 10**9, 0
        if self._begun >= _A_SECOND:
            return
        self._begun += 1
        self._look()
        if len(self._open) >= _MOST_OPEN:
            del self._open[next(iter(self._open))]
        about: dict[str, str | int] = {
            "batch": request.batch_id,
            "module": request.module_id,
            "env_runner": request.runner,
            "learner": request.learner,
        }
        self._open[request.batch_id] = _Batch(about, {"requested": now})

    def _note(self, batch_id: int, what: str, **attributes: str | int) -> None:
        if (batch := self._open.get(batch_id)) is not None:
            batch.moments.setdefault(what, self._now())
            batch.attributes.update(attributes)

    def _ended(self, batch_id: int, outcome: str, **attributes: str | int) -> None:
        """Its end, and so that of its trace."""
        if (batch := self._open.pop(batch_id, None)) is None:
            return
        batch.moments["ended"] = self._now()
        from opentelemetry.trace import set_span_in_context

        about = {**batch.attributes, "outcome": outcome, **attributes}
        moments = batch.moments
        root = self._tracer.start_span(
            "batch",
            start_time=moments["requested"],
            attributes={f"juggler.{key}": value for key, value in about.items()},
        )
        inside = set_span_in_context(root)
        known = [each for each in ("sampled", "issued") if each in moments]
        places = ["requested", *known, "ended"]
        names = {"requested": "sample", "sampled": "wait", "issued": "update"}
        for begin, end in pairwise(places):
            span = self._tracer.start_span(names[begin], inside, start_time=moments[begin])
            span.end(moments[end])
        root.end(moments["ended"])
