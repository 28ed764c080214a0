"""`juggler train --list` shows what ships, with what, and what was seen of it."""

from __future__ import annotations

import pytest

from juggler.cli import listing, main
from juggler.driver.config import RunConfig
from juggler.driver.shipped import Seen, Shipped, read_shipped, shipped_configs


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["train", "--list"]) == 0
    return capsys.readouterr().out.splitlines()


def test_there_is_a_line_for_each_with_its_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    head, *lines = _lines(capsys)
    assert head.split()[:4] == ["name", "algorithm", "environment", "extra"]
    algorithms = [read_shipped(name).config.learner.algorithm for name in shipped_configs()]
    assert [line.split()[:2] for line in lines] == [
        list(pair) for pair in zip(shipped_configs(), algorithms, strict=True)
    ]


def test_the_extra_that_one_needs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    extras = {line.split()[0]: line.split()[3] for line in _lines(capsys)}
    assert extras["cartpole"] == extras["memory-cartpole"] == "-"
    assert extras["hopper"] == "mujoco"
    assert extras["kuhn-poker"] == "openspiel"
    assert extras["lunarlander"] == "box2d"
    assert extras["pong"] == extras["breakout"] == "atari"


def test_what_was_seen_is_told_and_what_was_not_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {
        "one": Seen(478.26, 459_123, 3.64, 3, "2 cores, AMD EPYC"),
        "two": Seen(-85.0, 1_234_567, 100.0, 1, "a laptop"),
        "three": None,
        "four": "wins 99 % (benchmarks/games.md)",
    }
    monkeypatch.setattr(listing, "shipped_configs", lambda: [*seen])
    monkeypatch.setattr(
        listing, "read_shipped", lambda name: Shipped(name, RunConfig(), seen[name])
    )
    head, one, two, three, four = listing.listing().splitlines()
    assert head.split()[-5:] == ["return", "steps", "seconds", "seen", "on"]
    assert one.split()[4:7] == ["478.3", "459k", "3.6"]
    assert one.endswith("2 cores, AMD EPYC; median of seeds 0 to 2")
    assert two.split()[4:7] == ["-85.0", "1235k", "100.0"]
    assert two.endswith("a laptop; seed 0")
    assert three.split()[4:] == ["-", "-", "-", "not", "tried", "in", "full"]
    assert four.split()[4:8] == ["-", "-", "-", "wins"]
