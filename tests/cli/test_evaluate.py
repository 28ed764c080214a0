"""What `juggler evaluate` says of the episodes that it has played."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path

import pytest
from support.commands import status_of

from juggler.driver import evaluating
from juggler.driver.evaluating import Evaluated


@pytest.mark.parametrize(
    ("returns", "told"),
    [
        ([480.0] * 5, ["mean return: 480.0 to 480.0 (95 % interval)"]),
        ([480.0] * 4, []),
        ([480.0], []),
    ],
)
def test_few_episodes_have_a_return_and_no_interval(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    returns: list[float],
    told: list[str],
) -> None:
    played = Evaluated(Path("run/checkpoints/1"), returns, [480] * len(returns), [])
    monkeypatch.setattr(evaluating, "evaluate", lambda *_, **__: played)
    assert status_of("evaluate", "run", "--episodes", len(returns)) == 0
    said = capsys.readouterr().out
    assert ("1 episode: return " in said) == (len(returns) == 1)
    assert ("± 0.0 (standard deviation; least 480.0" in said) == (len(returns) > 1)
    assert [each for each in said.splitlines() if "interval" in each] == told


def test_videos_without_a_directory_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("evaluate", "run", "--videos", 5) == 2
    assert "--videos: give the directory for them, too, with --video" in capsys.readouterr().err


def test_json_is_alone_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def play(*_: object, **__: object) -> Evaluated:
        print("step 1")
        os.write(1, b"step 2, in C\n")
        returns = {("left", "main"): [1.0, math.nan]}
        return Evaluated(Path("run/checkpoints/1"), [1.0, 3.0], [5, 6], [Path("a.mp4")], returns)

    monkeypatch.setattr(evaluating, "evaluate", play)
    assert status_of("evaluate", "run", "--json") == 0
    captured = capfd.readouterr()
    said = json.loads(captured.out)
    assert (said["mean"], said["returns"], said["interval"]) == (2.0, [1.0, 3.0], None)
    assert (said["checkpoint"], said["videos"]) == ("run/checkpoints/1", ["a.mp4"])
    assert said["agent_returns"] == [{"agent": "left", "module": "main", "returns": [1.0, None]}]
    assert "step 1" in captured.err
    assert "step 2" in captured.err


def test_episodes_that_do_not_end_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "_MANY_STEPS", 10)
    seen: list[tuple[int, int]] = []
    watch = evaluating.warns_of_endless(lambda *said: seen.append(said))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(1, 10):
            watch(0, step)
        watch(1, 10)
        assert not told
        for step in range(11, 50):
            watch(1, step)
    (warned,) = told
    assert "no episode has ended in 10 steps" in str(warned.message)
    assert "TimeLimit" in str(warned.message)
    assert len(seen) == 49
