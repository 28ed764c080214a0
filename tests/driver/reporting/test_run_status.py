"""A run's status, and what Prometheus reads of it over HTTP."""

from __future__ import annotations

import re
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from rich.console import Console
from support.network import free_address
from support.pages import ROOT
from support.workers_world import ROWS, STEPS, WorkersWorld

from juggler.cli.arguments import MonitoringArguments
from juggler.cli.status import table
from juggler.driver.core.events import PeersMet
from juggler.driver.monitoring import plain_status
from juggler.driver.periodic_work import PeriodicWork, metrics_line
from juggler.driver.reporting import http_server
from juggler.driver.reporting.progress import Journal
from juggler.driver.reporting.prometheus import families, serve_metrics
from juggler.driver.reporting.wording import Progress
from juggler.driver.run_status import StatusReader
from juggler.driver.workers.evaluations import _Candidate
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.endpoints import EndpointError, split_address
from juggler.runtime.actors.hub import Vitals, WorkerLeft
from juggler.runtime.actors.tls import Tls, read_tls
from juggler.runtime.wire.v1 import status_pb2, training_pb2


class Watched:
    """A run whose status can be read."""

    def __init__(self, directory: Path) -> None:
        self.world = WorkersWorld(directory)
        self.journal = Journal(Progress(), directory, "run1")
        vitals = {"envrunner-0": Vitals(0.5, 1000, 10, 7.5)}
        self.world.parts.hub = cast(Any, SimpleNamespace(vitals=lambda: vitals))
        line = partial(metrics_line, self.world.parts)
        self._reader = StatusReader("run1", self.world.parts, self.journal, line)

    def read(self) -> dict[str, Any]:
        return plain_status(self._reader.read())

    def update(self) -> None:
        """On the batch that the runner was asked for first."""
        world = self.world
        world.sample(seconds={"inference": 1.0}, episode_returns=[5.0], episode_lengths=[9])
        command_id, update = world.asked(world.learner, training_pb2.Update)[-1]
        done = training_pb2.UpdateDone(
            update_id=update.update_id,
            version=training_pb2.WeightsVersion(generation=1, update=1),
            batches=[
                training_pb2.UsedBatch(batch_id=batch_id, live_steps=20, staleness=3)
                for batch_id in update.batch_ids
            ],
        )
        world.reply(world.learner, command_id, done)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


class _Once(Collector):
    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status

    def collect(self) -> Any:
        return families(self._status)


def _registry(status: dict[str, Any]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Once(status))
    return registry


def _samples(status: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """By name and labels, as a scrape would read them."""
    text = generate_latest(_registry(status)).decode()
    return {
        (sample.name.removeprefix("juggler_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_status_has_books_queues_and_workers(watched: Watched) -> None:
    watched.update()
    status = watched.read()
    line = status["metrics"]
    steps = [line[f"env_steps_{each}"] for each in ("sampled", "trained", "in_flight")]
    assert steps == [20, 20, 0]
    assert (line["updates"], line["weights_version"]) == (1, [1, 1])
    assert status["queues"]["requests_in_flight"] > 0
    runner, learner = status["workers"]
    names = ("worker_id", "role", "state", "host", "pid", "incarnation")
    known = ("envrunner-0", "envrunner", "ready", "host", 1, "incarnation-0")
    assert tuple(runner[name] for name in names) == known
    assert (runner["steps"], learner["steps"]) == (20, 20)
    assert runner["seconds"] == {"inference": 1.0}
    assert runner["resources"] == {"resident_bytes": 1000, "device_bytes": 10, "cpu_seconds": 7.5}
    assert learner["version"]["update"] == 1
    for histogram in ("sample_request_seconds", "update_seconds", "staleness"):
        assert sum(status[histogram]["counts"]) == 1
    assert status["staleness"]["sum"] == 3


def test_the_time_of_a_status_advances_without_new_lines(watched: Watched) -> None:
    line = {"wall_time": -1.0, "episodes": 3}
    reader = StatusReader("run1", watched.world.parts, watched.journal, lambda: line)
    first, second = (plain_status(reader.read())["metrics"] for _ in range(2))
    assert -1.0 < first["wall_time"] < second["wall_time"]
    assert first["episodes"] == 3


def test_metrics_that_the_page_names_are_there(watched: Watched) -> None:
    watched.update()
    watched.world.sample(1, dropped="refused")
    there = [each.name for family in families(watched.read()) for each in family.samples]
    of_others = ("module_", "agent_", "league_", "player_", "gateway_", "worker_counts")
    page = (ROOT / "docs" / "operations.md").read_text()
    named = {*re.findall(r"`juggler_(\w+)", page)} - {"driver_up", "episode_evaluation_return_mean"}
    for name in named:
        known = any(each.startswith(f"juggler_{name}") for each in there)
        assert known or name.startswith(of_others), name


def test_the_counter_of_updates_stays_when_a_group_returns_to_an_earlier_one(
    watched: Watched,
) -> None:
    watched.update()
    watched.world.parts.happened(PeersMet(generation=2, update=0))
    samples = _samples(watched.read())
    assert samples["weights_update",] == 0
    assert samples["updates_total",] == 1


def test_a_worker_that_died_stays_to_be_seen_with_its_error(watched: Watched) -> None:
    watched.world.leave(watched.world.runner)
    runner, _ = watched.read()["workers"]
    assert (runner["state"], runner["last_error"]) == ("left", "gone")
    samples = _samples(watched.read())
    assert samples["workers", "envrunner", "left"] == 1
    assert samples["workers_ready", "envrunner"] == 0
    assert samples["worker_steps_total", "envrunner-0"] == 0
    assert ("worker_resident_bytes", "envrunner-0") not in samples


def test_counters_never_go_backwards(watched: Watched) -> None:
    world = watched.world
    seen = [_samples(watched.read())]
    watched.update()
    seen.append(_samples(watched.read()))
    world.hear(WorkerLeft(world.runner, "gone"))
    seen.append(_samples(watched.read()))
    world.runner = world.join("envrunner")
    seen.append(_samples(watched.read()))
    counters = {key for each in seen for key in each if re.search("_(total|bucket|count)$", key[0])}
    assert len(counters) > 20
    for key in counters:
        values = [each.get(key, 0.0) for each in seen]
        assert values == sorted(values), key
    assert seen[-1]["restarts_total",] == 1


def test_what_happened_is_told(watched: Watched) -> None:
    for n in range(30):
        watched.journal.message(f"something {n}\nmore of it", "warning")
    log_messages = watched.read()["log_messages"]
    assert [each["text"] for each in log_messages] == [f"something {n}" for n in range(10, 30)]
    assert log_messages[0]["level"] == "warning"


def test_metrics_beyond_loopback_need_to_be_asked_for() -> None:
    with pytest.raises(EndpointError, match="--insecure"):
        serve_metrics("0.0.0.0:0", dict, insecure=False).__enter__()
    with serve_metrics("0.0.0.0:0", dict, insecure=True):
        pass


def test_simulators_at_gateways_are_counted_as_the_gateway_last_said(watched: Watched) -> None:
    world = watched.world
    assert not any(each["simulators"] for each in watched.read()["workers"])
    note = training_pb2.Note(text="has the simulator at 10.0.0.1:5: 4 environments")
    note.simulators.connected, note.simulators.environments = 1, 4
    world.report(world.runner, note)
    (runner,) = (each for each in watched.read()["workers"] if each["simulators"])
    assert runner["simulators"] == {"connected": 1, "environments": 4}
    world.sample(simulators=training_pb2.Simulators(connected=3, environments=12))
    status = watched.read()
    registry = _registry(status)
    of = {"worker": runner["worker_id"]}
    assert registry.get_sample_value("juggler_gateway_simulators", of) == 3
    assert registry.get_sample_value("juggler_gateway_environments", of) == 12
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(table(status, 120))
    assert "simulators 3 connected, with 12 environments" in " ".join(captured.get().split())
    world.leave(world.runner)
    assert not any(each["simulators"] for each in watched.read()["workers"])


# Checkpoints due while a module has no learner, which alone has its state.


class World(WorkersWorld):
    """A run of two modules, with checkpoints due on demand."""

    def __init__(self, directory: Path) -> None:
        agents = {"left": "blue", "right": "red"}
        super().__init__(directory, agents=agents, num_learners=2, devices="cpu")
        nothing = cast(Any, None)  # is written
        self.periodic_work = PeriodicWork(self.parts, nothing, [], lambda: None)

    def train(self) -> None:
        """The module "blue" has had an update."""
        requests = self.asked(self.runner, training_pb2.SampleRequest)
        command_id, request = next(each for each in requests if each[1].module_id == "blue")
        books = {"batch_id": request.batch_id, "live_steps": ROWS * STEPS}
        receipt = training_pb2.Receipt(module_id="blue", learner=request.learner, **books)
        self.reply(self.runner, command_id, receipt)
        ((command_id, update),) = self.asked(self.learner, training_pb2.Update)
        version = {"generation": update.generation, "update": 1}
        done = training_pb2.UpdateDone(
            module_id="blue", update_id=update.update_id, version=version, batches=[books]
        )
        self.reply(self.learner, command_id, done)
        assert self.parts.core.updates == 1

    def a_checkpoint_is_due(self) -> None:
        self.turns(due=["checkpoint"])

    def turns(self, due: list[str]) -> None:
        self.periodic_work._intervals = cast(Any, SimpleNamespace(due=lambda: due))
        self.periodic_work.on_intervals()

    def warnings(self) -> list[str]:
        return [text for text in self.told.messages if "no checkpoints" in text]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def asked_for_states(world: World) -> list[int]:
    return [len(world.asked(each, training_pb2.Snapshot)) for each in world.learners]


def test_people_are_told_once_that_checkpoints_wait_for_a_learner(world: World) -> None:
    world.train()
    world.leave(world.learners[1])
    world.a_checkpoint_is_due()
    assert world.warnings() == [], "it may be back in a moment"
    for _ in range(3):
        world.a_checkpoint_is_due()
    told = "there are no checkpoints while these modules have no learner: 'red'"
    assert world.warnings() == [told]
    assert world.told.levels[world.told.messages.index(told)] == "warning"
    assert asked_for_states(world) == [0, 0]


def test_the_one_that_waited_begins_with_the_learner_and_people_are_told_anew_of_the_next(
    world: World,
) -> None:
    world.train()
    world.leave(world.learners[1])
    for _ in range(2):
        world.a_checkpoint_is_due()
    world.learners[1] = world.joined("learner", 1)
    world.turns(due=[])
    assert asked_for_states(world) == [1, 1], "at once"
    world.a_checkpoint_is_due()
    assert asked_for_states(world) == [1, 1], "one at a time"
    world.leave(world.learners[1])
    for _ in range(2):
        world.a_checkpoint_is_due()
    assert len(world.warnings()) == 2


# /metrics over HTTP: which clients may read it.


def status() -> dict[str, Any]:
    read = status_pb2.RunStatus(updates=3)
    for histogram in (read.staleness, read.sample_request_seconds, read.update_seconds):
        histogram.counts.append(0)
    return plain_status(read)


@contextmanager
def metrics(**options: Any) -> Iterator[str]:
    """Served; where."""
    address = free_address()
    with serve_metrics(address, status, **options):
        yield address


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return made(tmp_path_factory.mktemp("tls"))


def made(directory: Path) -> Tls:
    make_certificates(directory, ["127.0.0.1"], 1)
    tls = read_tls(str(directory))
    assert tls is not None
    return tls


def scraper(tls: Tls, certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=f"{tls.directory}/ca.pem")
    if certificate:
        context.load_cert_chain(f"{tls.directory}/cert.pem", f"{tls.directory}/key.pem")
    return context


def scrape(url: str, token: str = "", context: ssl.SSLContext | None = None) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(url, headers=headers), timeout=60, context=context) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("shown", ["", "another", "a secre"])
def test_who_does_not_show_the_token_reads_nothing(shown: str) -> None:
    with metrics(token="a secret") as address:
        assert "juggler_updates" in scrape(f"http://{address}/metrics", "a secret")
        with pytest.raises(HTTPError) as refused:
            scrape(f"http://{address}/metrics", shown)
        assert refused.value.code == 401
        assert refused.value.headers["WWW-Authenticate"] == "Bearer"
        assert refused.value.read() == b"the token is missing or wrong\n"


def test_with_tls_it_wants_a_certificate_of_the_same_authority_too(
    tls: Tls, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with metrics(token="a secret", tls=tls) as address:
        url = f"https://{address}/metrics"
        assert "juggler_updates" in scrape(url, "a secret", scraper(tls))
        with pytest.raises(HTTPError, match="401"):
            scrape(url, context=scraper(tls))
        for stranger in (scraper(tls, certificate=False), scraper(made(tmp_path))):
            with pytest.raises((URLError, ssl.SSLError, ConnectionError)):
                scrape(url, "a secret", stranger)
        with pytest.raises(ConnectionError):
            scrape(f"http://{address}/metrics", "a secret")
        assert "juggler_updates" in scrape(url, "a secret", scraper(tls))
    assert capfd.readouterr() == ("", ""), "neither a scrape nor one that is refused writes a line"


def test_a_certificate_that_is_renewed_is_the_one_that_the_next_scrape_sees(tmp_path: Path) -> None:
    old = made(tmp_path)
    with metrics(tls=old) as address:
        url = f"https://{address}/metrics"
        before = scraper(old)
        scrape(url, context=before)
        for file in tmp_path.iterdir():
            file.unlink()
        scrape(url, context=scraper(made(tmp_path)))
        with pytest.raises(URLError):
            scrape(url, context=before)


def test_who_has_shown_the_token_is_not_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = threading.Event(), threading.Event()

    def slow_status() -> status_pb2.RunStatus:
        asked.set()
        assert answers.wait(60)
        return status()

    monkeypatch.setattr(sys.modules[__name__], "status", slow_status)
    monkeypatch.setattr(http_server, "_CLIENT_SECONDS", 300.0)  # none is silent for too long
    with ExitStack() as connections, metrics(token="secret") as address:
        scraped = connections.enter_context(ThreadPoolExecutor(1)).submit(
            scrape, f"http://{address}/metrics", "secret"
        )
        assert asked.wait(60)
        first, *_, last = (
            connections.enter_context(socket.create_connection(split_address(address), timeout=60))
            for _ in range(100)
        )
        last.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert last.recv(12) == b"HTTP/1.0 401"
        assert first.recv(1) == b"", "the first of too many silent ones makes room"
        monkeypatch.undo()
        answers.set()
        assert "juggler_driver_up" in scraped.result(60)


def test_who_stays_silent_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_CLIENT_SECONDS", 0.05)
    with (
        metrics() as address,
        socket.create_connection(split_address(address), timeout=60) as silent,
    ):
        assert silent.recv(1) == b""


def test_metrics_of_a_run_of_this_host_have_the_token_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUGGLER_TOKEN", "secret")
    given = MonitoringArguments(metrics_bind="127.0.0.1:0")
    assert given.monitoring(insecure=False).token == "secret"
    assert given.monitoring(insecure=True).token == ""
    assert given.monitoring(insecure=False, token="of-the-driver").token == "of-the-driver"


def test_a_status_says_which_step_of_its_end_holds_up_the_metrics(watched: Watched) -> None:
    parts = watched.world.parts
    assert watched.read()["phase"] == "training"
    assert parts.checkpoints.begin()
    assert watched.read()["phase"] == "training", "it continues while a checkpoint is written"
    parts.end.stop("stop_steps")
    assert watched.read()["phase"] == "writing the last checkpoint"
    parts.evaluations._candidate = _Candidate({"": 1.0}, 100)
    assert watched.read()["phase"] == "confirming that the run is solved"
    parts.evaluations.give_up_candidate()
    parts.checkpoints.abandon("default")
    assert watched.read()["phase"] == "stop_steps"
