"""What is said of values of options."""

from __future__ import annotations

import pytest
from support.commands import status_of

from juggler.driver.config import ConfigError, RunConfig
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.runtime import elsewhere


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("cartpole", "--stop-return", "high"), "not 'high'.*(default: 475.0)"),
        (("pendulum-td3", "--exploration-noise", "x"), "added to training actions.*(default: 0.1)"),
        (
            ("cartpole-ppo", "--clip", "x"),
            "ratio of an action's probability to the one that it was",
        ),
        (("cartpole-ppo", "--stop-steps", "1.5"), "expected a whole number, not '1.5'"),
        (
            ("cartpole", "--vectorize", "x"),
            "--vectorize: 'x' is not known: known are async, auto, native, sync",
        ),
        (("cartpole", "--seeds", "x"), "--seeds: expected a whole number, not 'x'"),
    ],
)
def test_a_wrong_value_is_told_with_what_this_run_has(
    given: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("train", *given) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    for part in words.split(".*"):
        assert part in said, said


def test_a_whole_number_may_have_an_exponent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[RunConfig] = []
    monkeypatch.setattr("juggler.cli.train.start_run", lambda run, *_, **__: started.append(run))
    assert status_of("train", "cartpole", "--stop-steps", "2.5e5", "--batch-size", "1e3") == 0
    (run,) = started
    assert (run.driver.stop_steps, run.learner.batch_size) == (250_000, 1000)
    assert type(run.driver.stop_steps) is type(run.learner.batch_size) is int


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("a2c", "ppo is the nearest here: with epochs = 1"),
        ("DDPG", "td3 is its successor"),
        ("Dreamer-V3", "no algorithm here learns a model"),
        ("ppo_lstm", 'with recurrent = "lstm" in the table model'),
    ],
)
def test_an_algorithm_of_other_libraries_is_answered_with_what_is_used_here(
    name: str, answer: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_flat({"algorithm": name})
    assert f"algorithm = {name!r} is not known: " in str(refused.value)
    assert answer in str(refused.value)
    assert "Known are appo, bc," in str(refused.value)


def test_no_algorithm_that_ships_is_answered_with_another_one() -> None:
    assert not {*ALGORITHMS} & {*elsewhere._ALGORITHMS}
