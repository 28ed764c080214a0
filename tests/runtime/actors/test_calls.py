"""The client's end of a stream: what is sent arrives in order, and every end is heard of."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from juggler.runtime.actors.calls import ClientStream, End
from juggler.runtime.actors.endpoints import SERVER_OPTIONS, bind, dial

PATIENCE = 30.0  # seconds until a test fails; nothing takes as long
BIG = 3 << 20  # bytes, of which a few are more than a connection holds


def failing(*messages: bytes) -> Callable[[], bytes | None]:
    """Makes these, and then fails."""

    def made() -> Iterator[bytes]:
        yield from messages
        raise ZeroDivisionError

    return made().__next__


def taking(messages: deque[bytes]) -> Callable[[], bytes | None]:
    return lambda: messages.popleft() if messages else None


class Server:
    """Answers each message with what `answer` makes of it, on a path.

    Attributes:
        ended: what the handler of each call ended with; None where it was in order.
        at_first: what every client is sent before it has said anything.
    """

    def __init__(self, directory: Path) -> None:
        self.address = f"unix:{directory / 's'}"
        self.answer: Callable[[bytes], list[bytes]] = lambda message: [message]
        self.at_first: list[bytes] = []
        self.ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = ThreadPoolExecutor(4)
        self._server = grpc.server(self._threads, options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test", {"Talk": handler}),)
        )
        bind(self._server, self.address)
        self._server.start()

    def stop(self) -> None:
        assert self._server.stop(None).wait(PATIENCE)
        self._threads.shutdown(wait=False)

    def _serve(self, requests: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.send_initial_metadata(())
        try:
            yield from self.at_first
            for message in requests:
                yield from self.answer(message)
        except (GeneratorExit, grpc.RpcError):  # the client is gone
            self.ended.put(None)
            raise
        except BaseException as error:
            self.ended.put(error)
            raise
        self.ended.put(None)


class Client:
    """One call.

    Attributes:
        heard: the messages that came.
        why: the call ended; None: it has not.
    """

    def __init__(self, address: str, *messages: bytes) -> None:
        self.heard: list[bytes] = []
        self.why: str | None = None
        self.received: Callable[[bytes], None] = lambda message: None
        self._changed = threading.Condition()
        self._unsent = deque(messages)
        self._channel = dial(address)
        self.stream = ClientStream(
            self._channel,
            "/test/Talk",
            (),
            taking(self._unsent),
            self._hear,
            self._end,
            name="client",
        )
        self.stream.wake()

    def say(self, *messages: bytes) -> None:
        self._unsent.extend(messages)
        self.stream.wake()

    def wait_for(self, messages: int) -> None:
        self._wait(lambda: len(self.heard) >= messages)

    def wait_for_end(self) -> str:
        self._wait(lambda: self.why is not None)
        assert self.why is not None
        return self.why

    def close(self) -> None:
        self._channel.close()

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(until, PATIENCE), (len(self.heard), self.why)

    def _hear(self, message: bytes) -> None:
        self.received(message)
        with self._changed:
            self.heard.append(message)
            self._changed.notify_all()

    def _end(self, end: End) -> None:
        with self._changed:
            assert self.why is None, "it ended before"
            self.why = end.why
            self._changed.notify_all()


@pytest.fixture
def server(tmp_path: Path, every_thread_ends: None) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def call(server: Server) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def made(*messages: bytes) -> Client:
        clients.append(Client(server.address, *messages))
        return clients[-1]

    yield made
    for client in clients:
        client.close()


def test_messages_of_every_size_are_answered_in_order(call: Callable[..., Client]) -> None:
    sizes = (0, 1, BIG, 5, 0, BIG, 100_000, BIG, BIG, 17)
    said = [bytes([number]) * size for number, size in enumerate(sizes)]
    client = call(*said)
    client.wait_for(len(said))
    client.say(*said)
    client.wait_for(2 * len(said))
    assert client.heard == said * 2


def test_a_server_may_say_more_than_it_hears_and_begin(
    server: Server, call: Callable[..., Client]
) -> None:
    server.at_first = [b"welcome", bytes(BIG)]
    server.answer = lambda message: [message, bytes(BIG), b"and"]
    client = call()
    client.wait_for(2)
    client.say(b"1", b"2")
    client.wait_for(8)
    assert [m for m in client.heard if len(m) < 10] == [b"welcome", b"1", b"and", b"2", b"and"]


def test_a_server_that_stops_frees_its_threads_and_ends_its_calls(
    server: Server, call: Callable[..., Client]
) -> None:
    clients = [call(b"hello", bytes(BIG), bytes(BIG)) for _ in range(3)]
    for client in clients:
        client.wait_for(1)
    server.stop()
    for client in clients:
        assert client.wait_for_end()
        assert server.ended.get(timeout=PATIENCE) is None


def test_nobody_to_be_reached_is_told(tmp_path: Path, every_thread_ends: None) -> None:
    client = Client(f"unix:{tmp_path / 'nobody'}", b"hello")
    assert "No such file" in client.wait_for_end()
    client.close()


def test_what_the_server_cannot_take_is_the_last_that_it_hears(
    server: Server, call: Callable[..., Client]
) -> None:
    heard: list[bytes] = []

    def answer(message: bytes) -> list[bytes]:
        heard.append(message)
        if message == b"bad":
            raise ValueError("no such thing")
        return [message]

    server.answer = answer
    client = call(b"good", b"bad", b"late")
    assert "no such thing" in client.wait_for_end()
    assert client.heard == [b"good"]
    assert heard == [b"good", b"bad"]
    assert isinstance(server.ended.get(timeout=PATIENCE), ValueError)
    other = call(b"good")
    other.wait_for(1)  # the server goes on


def test_what_the_client_cannot_take_ends_its_call(
    server: Server, call: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: SimpleQueue[Any] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", raised.put)
    gate = threading.Event()

    def refuse(message: bytes) -> None:
        gate.wait(PATIENCE)
        raise ValueError("no such thing")

    client = call()
    client.received = refuse
    client.say(b"hello", b"again")
    gate.set()
    assert "a message could not be used" in client.wait_for_end()
    assert client.heard == []
    assert raised.get(timeout=PATIENCE).exc_type is ValueError
    assert server.ended.get(timeout=PATIENCE) is None


def test_a_message_that_the_client_cannot_make_ends_its_call(
    call: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # its thread will raise
    client = call()
    stream: Any = client.stream
    stream._next_message = failing(b"hello")
    client.say()
    assert "a message could not be used" in client.wait_for_end()


def test_calls_that_come_and_go_leave_nothing_behind(
    server: Server, call: Callable[..., Client]
) -> None:
    before = threading.active_count()
    for number in range(40):
        client = Client(server.address, b"hello")
        if number % 2:
            client.wait_for(1)
        client.close()
        client.wait_for_end()
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > before + 4:  # those that serve
        assert time.monotonic() < deadline
        time.sleep(0.01)
