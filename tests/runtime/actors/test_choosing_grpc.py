"""Streams use gRPC's core if its private names work, else grpcio's public API, and say so."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest
from grpc._cython import cygrpc

from juggler.gateway import transport
from juggler.gateway.public_transport import PublicTransport
from juggler.runtime.actors import calls, core_calls, public_calls


@pytest.fixture(autouse=True)
def _chosen_anew(monkeypatch: pytest.MonkeyPatch, every_thread_ends: None) -> Iterator[None]:
    monkeypatch.delenv("JUGGLER_GRPC", raising=False)
    for module in (calls, transport):
        module._why_core_fails.cache_clear()
    yield
    for module in (calls, transport):
        module._why_core_fails.cache_clear()


def test_the_core_is_used_where_it_works() -> None:
    assert calls.why_slow() == transport.why_slow() == ""
    assert calls.calls() is core_calls
    assert not isinstance(transport.make_transport(""), PublicTransport)


def test_the_public_api_is_used_where_it_is_asked_for_and_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUGGLER_GRPC", "public")
    monkeypatch.setattr(calls, "_try", None)
    assert calls.why_slow() == transport.why_slow() == ""
    assert calls.calls() is public_calls
    assert isinstance(transport.make_transport(""), PublicTransport)


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUGGLER_GRPC", "core")
    with pytest.raises(ValueError, match="JUGGLER_GRPC=core: it may be 'public', or not be set"):
        calls.why_slow()


def no_operation(*_: object) -> None:
    raise TypeError("an operation takes other arguments")


def says_nothing(self: object, event: object) -> None:
    """A message is taken and never handed on."""


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda patch: patch.delattr(cygrpc, "SendMessageOperation"), "AttributeError: .*SendMess"),
        (
            lambda patch: patch.setattr(cygrpc, "SendMessageOperation", no_operation),
            "TypeError: an operation takes other arguments",
        ),
        (lambda patch: patch.setattr(core_calls.ClientStream, "_came", says_nothing), "Empty: "),
    ],
    ids=["missing", "changed", "mute"],
)
def test_names_that_do_not_work_are_given_up_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    words: str,
) -> None:
    monkeypatch.setattr(calls, "TRIAL_SECONDS", 0.5)
    break_it(monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("threading.excepthook", lambda _: None)  # a thread of the trial may raise
        why = calls.why_slow()
    assert why.startswith("uses the public API of grpcio, which is slower: in grpcio ")
    assert re.search(words, why), why
    assert calls.calls() is public_calls


def test_a_gateway_gives_up_names_that_its_server_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cygrpc, "CompletionQueue")
    assert "AttributeError" in transport.why_slow()
    assert isinstance(transport.make_transport(""), PublicTransport)


def test_a_trial_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "TRIAL_SECONDS", 0.05)
    assert "TimeoutError: they hang" in calls.why_fails(lambda: time.sleep(1))
