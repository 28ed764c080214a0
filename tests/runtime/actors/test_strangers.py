"""Calls without the token never keep others out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from support.changes import SkippedTime
from support.hub_world import World

from juggler.runtime.actors import attachment as attachment_module
from juggler.runtime.actors import health as health_module
from juggler.runtime.actors import hub, worker
from juggler.runtime.actors.attachment import AttachError, Attachment, Contact, DriverBusy
from juggler.runtime.actors.credentials import Strangers
from juggler.runtime.actors.endpoints import bind
from juggler.runtime.actors.health import Health, check_health
from juggler.runtime.actors.hub import ATTACH_METHOD, Mailbox, WorkerJoined
from juggler.runtime.actors.logs import WorkerLog
from juggler.runtime.actors.worker import _attach, _LeavingInbox
from juggler.runtime.wire.v1 import attach_pb2

_SECONDS = 30.0


def test_one_stranger_too_many_ends_the_visit_that_has_lasted_longest() -> None:
    strangers, ended = Strangers(2), list[str]()
    with ExitStack() as visits:
        for name in "abcd":
            visits.enter_context(strangers.visit(lambda name=name: ended.append(name)))  # type: ignore[misc]
        assert ended == ["a", "b"]
    with strangers.visit(lambda: ended.append("e")), strangers.visit(lambda: ended.append("f")):
        assert ended == ["a", "b"], "a stranger that left makes room"


_ASKS = health_pb2.HealthCheckRequest().SerializeToString()


def _read(call: Any, ended: threading.Semaphore) -> None:
    """Read to the end, which reaches a client after all messages."""
    with suppress(grpc.RpcError):
        for _ in call:
            pass
    ended.release()


@pytest.mark.parametrize(
    ("method", "first"), [("/grpc.health.v1.Health/Watch", [_ASKS]), (ATTACH_METHOD, [])]
)
def test_calls_without_the_token_keep_no_worker_and_no_probe_out(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, first: list[bytes]
) -> None:
    for module, name in ((hub, "_MOST_STRANGERS"), (health_module, "MOST_ASKING")):
        monkeypatch.setattr(module, name, 4)
    health, says, ended = Health(), SimpleQueue[Any](), threading.Semaphore(0)
    world.start(token="secret", max_workers=8, services=(health,))
    world.address = world.tcp_address
    with grpc.insecure_channel(world.address) as channel:
        stay = channel.stream_stream(method)
        calls = [stay(chain(first, iter(says.get, None)), timeout=_SECONDS) for _ in range(12)]
        for call in calls:
            threading.Thread(target=_read, args=(call, ended)).start()
        for _ in range(len(calls) - 4):
            assert ended.acquire(timeout=_SECONDS), "the first have to go"
        for _ in range(3):
            attachment = world.attach(token="secret")
            assert world.wait_for(WorkerJoined).worker.incarnation == attachment.incarnation
            assert check_health(world.address, "", None, _SECONDS) == ""
        for _ in calls:
            says.put(None)


def test_a_stream_without_the_token_in_its_metadata_is_refused_before_its_hello_is_taken(
    world: World,
) -> None:
    world.start(token="secret")
    metadata: tuple[tuple[str, str], ...]
    says: SimpleQueue[bytes | None] = SimpleQueue()  # which never get a hello
    with grpc.insecure_channel(world.tcp_address) as channel:
        for metadata in (), (("authorization", "Bearer guess"),):
            call = channel.stream_stream(ATTACH_METHOD)(
                iter(says.get, None), timeout=_SECONDS, metadata=metadata
            )
            refusal = attach_pb2.ToWorker.FromString(next(call)).refusal
            assert refusal.reason == "the token is missing or wrong"
            says.put(None)


def test_a_stranger_that_does_not_read_why_it_is_refused_is_cut_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start(token="secret")
    ended, visit = threading.Event(), world.hub._strangers.visit
    writes, send = threading.Event(), hub.AttachStream.send

    def sent(self: Any, message: Any) -> Any:
        writes.set()
        return send(self, message)

    monkeypatch.setattr(hub.AttachStream, "send", sent)

    def seen(end: Callable[[], object]) -> AbstractContextManager[None]:
        handler = end.__self__  # type: ignore[attr-defined]
        handler.add_done_callback(lambda _: ended.set())
        return visit(end)

    monkeypatch.setattr(world.hub._strangers, "visit", seen)
    message = attach_pb2.FromWorker(hello=attach_pb2.Hello(incarnation="x" * 60_000))
    # It has room for 5 bytes, and makes no more, since it takes none.
    options = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
    says: SimpleQueue[bytes | None] = SimpleQueue()
    says.put(message.SerializeToString())
    with grpc.insecure_channel(world.tcp_address, options) as channel:
        call = channel.stream_stream(ATTACH_METHOD)(iter(says.get, None))
        assert writes.wait(_SECONDS)
        assert not ended.is_set()
        world.loop.let_pass(6)
        assert ended.wait(_SECONDS), "the hub waits for it no more"
        assert call.is_active(), "and it has not gone by itself"
        says.put(None)


def _busy_at_first(times: int, code: grpc.StatusCode) -> tuple[Any, list[str]]:
    """A driver's end that refuses N streams, and accepts the next."""
    came = list[str]()

    def attach(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        hello = attach_pb2.FromWorker.FromString(next(messages)).hello
        came.append(hello.incarnation)
        if len(came) <= times:
            context.abort(code, "no room")
        welcome = attach_pb2.Welcome(worker_id="worker-0", run_id="run")
        yield attach_pb2.ToWorker(welcome=welcome).SerializeToString()
        for _ in messages:
            pass

    service, method = ATTACH_METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(attach)
    return grpc.method_handlers_generic_handler(service, {method: handler}), came


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Any], str]]:
    servers = []

    def start(handler: Any) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(8))
        servers.append(server)
        server.add_generic_rpc_handlers((handler,))
        bind(server, f"unix:{tmp_path / 'd'}")
        server.start()
        return f"unix:{tmp_path / 'd'}"

    yield start
    for server in servers:
        server.stop(grace=0).wait()


def _come(contact: Contact) -> Attachment:
    inbox = _LeavingInbox(watched=False)
    try:
        return _attach(partial(Attachment, contact, "worker", inbox), contact, WorkerLog("worker"))
    finally:
        inbox.has_left()  # else this process ends


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED],
    ids=str,
)
def test_a_worker_comes_back_to_a_driver_that_has_no_room(
    serve: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    handler, came = _busy_at_first(2, code)
    set_before: list[int] = []  # attempts
    monkeypatch.setattr(worker, "time", SkippedTime())
    monkeypatch.setattr(worker, "must_end", lambda seconds: set_before.append(len(came)))
    _come(Contact(serve(handler), timeout=60.0, reattach_seconds=60.0)).close()
    assert len(set(came)) == 3
    assert set_before[:3] == [0, 1, 2], "each attempt has its full time before it is ended"


def test_a_worker_gives_up_when_its_time_is_over(
    serve: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "time", SkippedTime())
    handler, came = _busy_at_first(1000, grpc.StatusCode.RESOURCE_EXHAUSTED)
    address = serve(handler)
    with pytest.raises(DriverBusy, match="broke off: no room"):
        _come(Contact(address, reattach_seconds=60.0))
    assert len(came) >= 2


@pytest.mark.parametrize("says", ["nothing", "commands"])
def test_a_worker_gives_up_on_a_driver_that_does_not_greet_it(
    serve: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    came, given_up, close = threading.Event(), threading.Event(), Attachment.close

    def attach(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        assert context.add_callback(given_up.set)
        came.set()
        if says == "commands":
            yield attach_pb2.ToWorker(commands=[attach_pb2.Command(id=1)]).SerializeToString()
        given_up.wait(_SECONDS)

    service, method = ATTACH_METHOD.strip("/").split("/")
    served = {method: grpc.stream_stream_rpc_method_handler(attach)}
    address = serve(grpc.method_handlers_generic_handler(service, served))
    why = "did not greet this worker"
    if says == "nothing":
        monkeypatch.setattr(attachment_module, "WELCOME_SECONDS", 0.0)
        why = "accepted the connection, and then sent nothing for 0 s"

    def closes(self: Attachment) -> None:
        assert came.wait(_SECONDS)
        close(self)

    monkeypatch.setattr(Attachment, "close", closes)
    with pytest.raises(AttachError, match=f"^the driver at {address} {why}"):
        Attachment(Contact(address), "worker", Mailbox())
    assert given_up.wait(_SECONDS), "the stream is closed"


def test_a_welcome_that_comes_too_late_does_not_reach_the_next_attempt(
    serve: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up, came, over = threading.Event(), threading.Event(), threading.Event()

    def attach(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        given_up.wait(_SECONDS)
        late = attach_pb2.ToWorker(welcome=attach_pb2.Welcome(worker_id="worker-0"))
        late.commands.add(id=1)
        yield late.SerializeToString()
        over.wait(_SECONDS)

    received, ended, close = Attachment._received, Attachment._ended, Attachment.close

    def notices(self: Attachment, message: bytes) -> None:
        received(self, message)
        came.set()

    def notices_the_end(self: Attachment, end: Any) -> None:
        ended(self, end)
        over.set()

    def closes(self: Attachment) -> None:
        given_up.set()
        assert came.wait(_SECONDS)
        close(self)

    monkeypatch.setattr(attachment_module, "WELCOME_SECONDS", 0.0)
    monkeypatch.setattr(Attachment, "_received", notices)
    monkeypatch.setattr(Attachment, "_ended", notices_the_end)
    monkeypatch.setattr(Attachment, "close", closes)
    service, method = ATTACH_METHOD.strip("/").split("/")
    served = {method: grpc.stream_stream_rpc_method_handler(attach)}
    address = serve(grpc.method_handlers_generic_handler(service, served))
    inbox: Mailbox[Any] = Mailbox()  # of all attempts
    with pytest.raises(DriverBusy):
        Attachment(Contact(address), "worker", inbox)
    assert over.wait(_SECONDS)
    assert inbox.gather() == []
