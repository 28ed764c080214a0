"""Training with what torch.compile makes of the training pass, and in bfloat16."""

from __future__ import annotations

import pytest
from support.place import Place, assert_books_balance, eventually, metrics, summary

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_run_with_a_compiled_pass_learns_by_it(place: Place) -> None:
    limits = ("--stop-return", 100, "--stop-steps", 1_000_000)
    run = place.run("train", "cartpole", "--compile", *limits, "--run-dir", "run")
    assert run.status == 0, run.output
    # What was compiled stays in the temporary directory for the next run, and no process does.
    eventually(lambda: not place.processes(), 10.0, "processes are left behind")
    assert_books_balance(place.path / "run")
    assert summary(place.path / "run")["solved"]
    last = metrics(place.path / "run")[-1]["modules"]["default"]
    assert last["compiled_calls"] >= 1  # in each update


@pytest.mark.long
def test_cartpole_is_learned_in_bfloat16(place: Place) -> None:
    limits = ("--stop-return", 100, "--stop-steps", 1_000_000)
    options = ("--precision", "bfloat16", *limits)
    run = place.run("train", "cartpole", *options, "--run-dir", "run")
    assert run.status == 0, run.output
    assert summary(place.path / "run")["solved"]
