"""Attach streams of workers that mean harm, or do it: each is told why and let go, and an honest
worker beside them notices nothing."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.hub_world import World

from juggler.runtime.actors.attachment import Command, Detached
from juggler.runtime.actors.endpoints import PROTOCOL_VERSION
from juggler.runtime.actors.hello import MOST_EVENTS_PER_SECOND, Rate, Refused, read_hello
from juggler.runtime.actors.hub import ATTACH_METHOD, REASON_KEY
from juggler.runtime.actors.hub_events import Joined, Left
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.wire.v1 import attach_pb2


def hello(**changes: Any) -> bytes:
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "role": "worker",
        "index": -1,
        "incarnation": "bad",
        "token": "secret",
    }
    return attach_pb2.FromWorker(hello=attach_pb2.Hello(**fields | changes)).SerializeToString()


def said(**fields: Any) -> bytes:
    return attach_pb2.FromWorker(**fields).SerializeToString()


def replies(count: int) -> bytes:
    many = [attach_pb2.Reply(id=number, last=True) for number in range(count)]
    return attach_pb2.FromWorker(replies=many).SerializeToString()


def conversation(address: str, *messages: bytes) -> tuple[bool, str]:
    """Whether whoever says this was let in, and what its stream ended with."""
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for message in messages:
        outgoing.put(message)
    welcome = False
    # No limit on what it sends.
    with grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel:
        call = channel.stream_stream(ATTACH_METHOD)(iter(outgoing.get, None), timeout=30)
        try:
            for raw in call:
                down = attach_pb2.ToWorker.FromString(raw)
                welcome = welcome or down.HasField("welcome")
                if down.HasField("refusal"):
                    return welcome, down.refusal.reason
            reason = dict(call.trailing_metadata()).get(REASON_KEY, b"").decode()
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            outgoing.put(None)
    return welcome, reason


@contextmanager
def an_honest_worker(world: World) -> Iterator[None]:
    """It is there before and after, and answers."""
    inbox: Mailbox[Any] = Mailbox()
    attachment = world.attach("other", token="secret", inbox=inbox)
    worker = world.wait_until(lambda e: isinstance(e, Joined) and e.worker.role == "other").worker
    yield
    assert world.hub.send(worker, 7, attach_pb2.Stop())
    (command,) = inbox.gather(timeout=10)
    assert isinstance(command, Command)
    attachment.reply(command.command_id, attach_pb2.Done())
    world.wait_until(lambda event: getattr(event, "worker", None) is worker)
    assert not any(isinstance(event, Left) and event.worker is worker for event in world.seen)


NOT_LET_IN: dict[str, list[bytes]] = {
    "sent bytes that are not a message of an attach stream": [b"\xff\xff"],
    "the first message must be a hello with an incarnation": [replies(1)],
    "the token is missing or wrong": [hello(token="guess")],
    "this driver speaks protocol version 6, the worker 7": [hello(protocol_version=7)],
    "this is run run, not another": [hello(run_id="another")],
    "unknown role 'king': expected one of worker, other": [hello(role="king")],
    "index 2000000000: at most 4095": [hello(index=2_000_000_000)],
    "a hello of 70042 bytes: at most 65536": [hello(host="x" * 70_000)],
    "incarnation: must be at most 64 bytes": [hello(incarnation="x" * 65)],
    "host: must be at most 255 bytes that can be printed": [hello(host="a\nhost")],
    "address: must be at most 255 bytes": [hello(data_addresses=["x" * 256])],
    "a hello with 100 of address: at most 64": [hello(data_addresses=["x"] * 100)],
    "a hello with 65 of device: at most 64": [hello(devices=["cpu"] * 65)],
    "RESOURCE_EXHAUSTED: SERVER: Received message larger than max": [hello(host="x" * 9_000_000)],
}


@pytest.mark.parametrize("answer", NOT_LET_IN)
def test_who_is_not_let_in_is_told_why(world: World, answer: str) -> None:
    world.start(token="secret")
    with an_honest_worker(world):
        welcome, reason = conversation(world.address, *NOT_LET_IN[answer])
        assert not welcome
        assert reason.startswith(answer)


LET_GO: dict[str, list[bytes]] = {
    "sent bytes that are not a message of an attach stream": [hello(), b"\xff\xff"],
    "sent a second hello": [hello(), hello()],
    "sent over 20000 replies and reports in a second": [hello(), *[replies(10_001)] * 6],
    "RESOURCE_EXHAUSTED: SERVER: Received message larger than max": [hello(), b"x" * 9_000_000],
    "sent a message of over 20000 entries": [hello(), b"\x1a\x00" * 4_000_000],
    "sent a stack of 200000 characters: at most 131072": [
        hello(),
        said(heartbeat=attach_pb2.Heartbeat(stack="x" * 200_000)),
    ],
    "sent a traceback of 200000 characters: at most 131072": [
        hello(),
        said(replies=[attach_pb2.Reply(failure=attach_pb2.Failure(traceback="x" * 200_000))]),
    ],
    "sent a farewell with over 65536 commands": [
        hello(),
        said(farewell=attach_pb2.Farewell(unanswered=range(70_000))),
    ],
}


@pytest.mark.parametrize("answer", LET_GO)
def test_who_is_let_in_and_then_says_what_it_must_not_is_told_why(
    world: World, answer: str
) -> None:
    world.start(token="secret")
    with an_honest_worker(world):
        welcome, reason = conversation(world.address, *LET_GO[answer])
        assert welcome
        assert reason.startswith(answer)
        left = world.wait_for(Left)
        assert left.worker.incarnation == "bad"
        assert left.reason in (reason, "the connection ended without a farewell")


def test_what_is_said_for_people_in_one_line_is_in_one_line(world: World) -> None:
    world.start(token="secret")
    failure = attach_pb2.Failure(message="it\nfailed\r\n" + "x" * 9000, traceback="a\nb")
    farewell = attach_pb2.Farewell(reason="error: forged\u2028line\n", failure=failure)
    conversation(world.address, hello(), said(farewell=farewell))
    left = world.wait_for(Left)
    assert left.reason == "error: forged line"
    assert left.failure.message.startswith("it failed xxx")
    assert len(left.failure.message) <= 1000
    assert left.failure.traceback == "a\nb"
    hung = attach_pb2.Heartbeat(seconds_since_progress=1e9, held_up_by="a\nb", stack="c\nd")
    conversation(world.address, hello(), said(heartbeat=hung))
    left = world.wait_for(Left)
    assert left.reason == "hung in a b: no progress for 1000000000 s"
    assert left.stack == "c\nd"


def test_who_says_no_hello_is_told_why(world: World) -> None:
    world.start(token="secret", silence_seconds=2.0, silence_of={"other": 60.0})
    with an_honest_worker(world):
        assert conversation(world.address) == (False, "no hello within 2 s")


def test_a_worker_is_local_only_where_it_came_over_a_unix_socket(world: World) -> None:
    world.start()
    world.attach(local=True)
    assert world.wait_for(Joined).worker.local
    world.address = world.tcp_address
    world.attach(local=True)
    assert not world.wait_for(Joined).worker.local


def test_a_worker_hears_why_it_was_let_go(world: World) -> None:
    world.start()
    inbox: Mailbox[Any] = Mailbox()
    world.attach(inbox=inbox)
    world.hub.dismiss(world.wait_for(Joined).worker, "sent what cannot be understood: é")
    (detached,) = inbox.gather(timeout=10)
    assert isinstance(detached, Detached)
    assert detached.reason == "the driver let this worker go: sent what cannot be understood: é"


def test_a_rate_counts_seconds_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    rate = Rate()
    for _ in range(3):
        rate.count(MOST_EVENTS_PER_SECOND)
        now += 1.0
    rate.count(1)
    with pytest.raises(Refused, match="sent over 20000"):
        rate.count(MOST_EVENTS_PER_SECOND)


def _hellos() -> st.SearchStrategy[bytes]:
    text = st.one_of(st.sampled_from(["worker", "secret", "run", ""]), st.text(max_size=9))
    return st.builds(
        hello,
        protocol_version=st.one_of(st.just(PROTOCOL_VERSION), st.integers(0, 2**32 - 1)),
        role=text,
        index=st.integers(-(2**31), 2**31 - 1),
        incarnation=text,
        run_id=text,
        token=text,
        pid=st.integers(0, 2**32 - 1),
        data_addresses=st.lists(text, max_size=3),
    )


@settings(max_examples=500)
@given(_hellos(), st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=3))
def test_any_hello_is_refused_or_has_all_that_it_must(
    raw: bytes, changes: list[tuple[int, int]]
) -> None:
    damaged = bytearray(raw)
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    try:
        read = read_hello(bytes(damaged), "secret", "run", ("worker",))
    except Refused as refused:
        reason = str(refused)
    else:
        assert (read.token, read.role) == ("secret", "worker")
        reason = "" if read.incarnation else "no incarnation"
        assert not reason
    assert len(reason) < 500


_messages = st.one_of(
    st.binary(max_size=40),
    st.builds(replies, st.integers(0, 5)),
    st.binary(max_size=9).map(lambda b: hello() + b),
    st.just(attach_pb2.FromWorker(farewell=attach_pb2.Farewell(reason="x")).SerializeToString()),
)


@pytest.mark.parametrize("examples", [60, pytest.param(5_000, marks=[pytest.mark.long])])
def test_a_stream_of_anything_ends_and_leaves_the_others_alone(world: World, examples: int) -> None:
    world.start(token="secret")

    @settings(max_examples=examples, phases=[Phase.generate])
    @given(st.lists(_messages, min_size=1, max_size=5), st.booleans())
    def stream(messages: list[bytes], greets: bool) -> None:
        outgoing = iter([*([hello()] if greets else []), *messages])
        with grpc.insecure_channel(world.address) as channel:
            answers = list(channel.stream_stream(ATTACH_METHOD)(outgoing, timeout=10))
        assert len(answers) == 1
        down = attach_pb2.ToWorker.FromString(answers[0])
        assert down.HasField("welcome") or down.refusal.reason

    with an_honest_worker(world):
        stream()
