"""Traces of batches, with the real OpenTelemetry."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.synchronous_rounds import play_a_round, synchronous

from juggler.driver.core import events
from juggler.driver.core.events import Share, UsedBatch
from juggler.driver.driver_config import ConfigError
from juggler.driver.tracing import BatchTraces, must_be_able_to_trace, tracing
from juggler.runtime.episodes.version import Version

export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

# What threads of one test log would be told in the next one.
pytestmark = pytest.mark.usefixtures("every_thread_ends")


class Clock:
    def __init__(self) -> None:
        self.now = 10**9

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def spans() -> tuple[Any, BatchTraces, Clock]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter, clock = export.InMemorySpanExporter(), Clock()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter, BatchTraces(provider.get_tracer("test"), provider.shutdown, clock), clock


def request(batch_id: int) -> events.Request:
    return events.Request("envrunner-0", "a", batch_id, "learner-0", 1, Version(1, 0))


def test_a_batch_is_one_trace_whose_spans_follow_each_other(
    spans: tuple[Any, BatchTraces, Clock],
) -> None:
    exporter, traces, clock = spans
    traces.command(request(7))
    clock.now += 30
    traces.event(events.Arrived("learner-0", "b", 7, 20))
    clock.now += 5
    traces.event(events.SampleReceived(7, "envrunner-0", "a", "learner-0", 20, Version(1, 0)))
    traces.command(events.IssueUpdate(3, 1, (Share("learner-0", (7,)),)))
    clock.now += 100
    used = (UsedBatch(7, 20, 2),)
    traces.event(events.UpdateFinished(3, "learner-0", "b", Version(1, 4), used))
    found = {span.name: span for span in exporter.get_finished_spans()}
    times = {name: (each.start_time, each.end_time) for name, each in found.items()}
    began = 10**9
    assert times == {
        "sample": (began, began + 30),
        "wait": (began + 30, began + 35),
        "update": (began + 35, began + 135),
        "batch": (began, began + 135),
    }
    batch = found["batch"]
    assert {each.context.trace_id for each in found.values()} == {batch.context.trace_id}
    assert found["wait"].parent.span_id == batch.context.span_id
    assert dict(batch.attributes) == {
        "juggler.batch": 7,
        "juggler.module": "default",
        "juggler.env_runner": "envrunner-0",
        "juggler.learner": "learner-0",
        "juggler.steps": 20,
        "juggler.outcome": "trained",
        "juggler.staleness": 2,
        "juggler.update": 4,
    }


def test_a_dropped_batch_says_why_and_at_most_ten_a_second_are_traced(
    spans: tuple[Any, BatchTraces, Clock],
) -> None:
    exporter, traces, clock = spans
    for batch_id in range(25):
        traces.command(request(batch_id))
    clock.now += 10**9
    traces.command(request(25))
    for batch_id in range(26):
        lost = events.SampleReceived(
            batch_id, "envrunner-0", "a", "learner-0", 20, Version(1, 0), "learner_lost"
        )
        traces.event(lost)
    batches = [span for span in exporter.get_finished_spans() if span.name == "batch"]
    assert [span.attributes["juggler.batch"] for span in batches] == [*range(10), 25]
    assert {span.attributes["juggler.outcome"] for span in batches} == {"learner_lost"}


def unheard(text: str) -> None:
    raise AssertionError(text)


def test_a_run_writes_its_traces_into_a_file(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    must_be_able_to_trace(str(file))
    world = synchronous(tmp_path / "checkpoints")
    world.parts.traces = tracing(str(file), "mine", unheard)
    play_a_round(world)
    play_a_round(world)
    world.parts.traces.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    batches = [line for line in lines if line["name"] == "batch"]
    assert len(batches) == 2, "those of the second round, whose requests were traced"
    assert {line["attributes"]["juggler.outcome"] for line in batches} == {"trained"}
    assert batches[0]["resource"]["attributes"]["juggler.run"] == "mine"


def test_an_endpoint_gets_them_over_http(tmp_path: Path) -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            traces = tracing(f"http://127.0.0.1:{server.server_port}", "mine", unheard)
            traces.command(request(7))
            traces.event(events.SampleFailed(7, "envrunner-0", "a"))
            traces.close()
        finally:
            server.shutdown()
            thread.join()
    ((path, content),) = got
    assert path == "/v1/traces"
    assert b"juggler.outcome" in content


def test_an_endpoint_that_does_not_answer_does_not_hold_up_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("juggler.driver.tracing._END_SECONDS", 0.5)
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and says nothing
        traces = tracing(f"http://127.0.0.1:{server.getsockname()[1]}", "mine", told.append)
        traces.command(request(7))
        traces.event(events.SampleFailed(7, "envrunner-0", "a"))
        began = time.monotonic()
        traces.close()
        assert time.monotonic() - began < 5, "it would be tried for ten seconds"


def test_an_endpoint_that_is_dead_is_told_in_one_line_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("juggler.driver.tracing._END_SECONDS", 2.0)  # it is tried twice or more
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told: list[str] = []
    traces = tracing(f"http://127.0.0.1:{port}", "mine", told.append)
    for batch_id in range(3):
        traces.command(request(batch_id))
        traces.event(events.SampleFailed(batch_id, "envrunner-0", "a"))
    traces.close()
    (line,) = told
    assert line.startswith(f"trace = 'http://127.0.0.1:{port}': traces cannot be sent there, and")
    assert "Connection refused" in line
    assert "\n" not in line
    assert capfd.readouterr() == ("", "")


def test_a_disk_that_is_full_is_told_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    traces = tracing("/dev/full", "mine", told.append)
    traces.command(request(7))
    traces.event(events.SampleFailed(7, "envrunner-0", "a"))
    traces.close()
    assert told == [
        "trace = '/dev/full': traces cannot be written there, and are lost meanwhile "
        "([Errno 28] No space left on device)"
    ]
    assert capfd.readouterr() == ("", "")


def test_without_the_packages_or_a_place_to_write_the_run_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"trace = .*: cannot write there: No such file"):
        must_be_able_to_trace(str(tmp_path / "nowhere" / "traces"))
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"is missing: .*pip install .*\[tracing\]"):
        must_be_able_to_trace("http://localhost:4318")
