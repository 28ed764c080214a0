"""What `juggler evaluate` says of the episodes that it has played."""

from __future__ import annotations

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
