"""Configurations that ship and that no other test trains: they learn, or at least they run."""

from __future__ import annotations

import pytest
from support.place import Place, assert_books_balance, summary

from juggler.driver.shipped import read_shipped
from juggler.envrunner.environments.extras import check_extra

pytestmark = pytest.mark.slow


def skip_without_its_packages(name: str) -> None:
    try:
        check_extra(read_shipped(name).config.env_runner.env)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.long  # as pong, which another test trains
def test_breakout_makes_some_updates_and_plays(place: Place) -> None:
    skip_without_its_packages("breakout")
    steps = 3 * read_shipped("breakout").config.learner.batch_size
    run = place.run("train", "breakout", "--run-dir", "run", "--stop-steps", steps)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    end = summary(place.path / "run")
    assert end["updates"] >= 2
    assert end["modules"]["default"]["skipped"] == 0
    played = place.run("evaluate", "run", "--episodes", 1)
    assert played.status == 0, played.output
    assert "1 episode: return" in played.output
    place.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("name", "threshold"),
    [
        pytest.param("hopper", 300.0, marks=pytest.mark.long),
        pytest.param("lunarlander", -50.0, marks=pytest.mark.long),
        ("memory-cartpole", 250.0),
        ("mountaincar-continuous", 80.0),
    ],
)
@pytest.mark.long
def test_it_reaches_its_threshold(place: Place, name: str, threshold: float) -> None:
    skip_without_its_packages(name)
    options = ["--run-dir", "run", "--stop-return", threshold, "--stop-steps", 5_000_000]
    run = place.run("train", name, *options)
    assert run.status == 0, run.output
    end = summary(place.path / "run")
    assert end["solved"], run.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()
