from __future__ import annotations

import signal
import threading

import pytest

from juggler.driver import signals
from juggler.driver.signals import signals_become


@pytest.fixture(autouse=True)
def _each_signal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_SAME_SECONDS", 0.0)


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    asked: list[str] = []
    called = threading.Event()
    with signals_become(lambda reason: (asked.append(reason), called.set())[0]):
        signal.raise_signal(signal.SIGTERM)
        assert called.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == ["terminated"]


def test_a_second_sigterm_ends_a_program_as_it_ends_every_other() -> None:
    with signals_become(lambda _: None) as caught:
        signal.raise_signal(signal.SIGTERM)
        assert caught.number == signal.SIGTERM
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)


def test_no_signal_cuts_the_clean_up_short() -> None:
    asked: list[str] = []
    with signals_become(asked.append):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a third one
    with signals_become(asked.append) as caught:
        signal.raise_signal(signal.SIGINT)
        caught.no_more()
        signal.raise_signal(signal.SIGINT)


def test_a_run_that_nohup_started_outlives_its_terminal() -> None:
    asked: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_become(asked.append) as caught:
            signal.raise_signal(signal.SIGHUP)
        assert caught.number == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert asked == []
