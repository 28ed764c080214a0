from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juggler.cli import scale
from juggler.launch.scaling import Wanted, shared_out


@given(
    st.integers(0, 5000),
    st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(lambda each: sum(each) > 0),
)
def test_shares_add_up_and_are_off_by_less_than_one(total: int, weights: list[int]) -> None:
    shares = shared_out(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1
        assert weight or not share


def test_the_numbers_of_the_file_are_shared_out_as_they_are() -> None:
    assert shared_out(48, [16, 0, 32]) == [16, 0, 32]


def test_wanted_numbers_are_read_by_others_until_the_run_is_over(tmp_path: Path) -> None:
    wanted = Wanted(tmp_path)
    assert not wanted.are_there
    wanted.begin("learner", 1)
    wanted.begin("envrunner", 16)
    other = Wanted(tmp_path)
    assert other.change("envrunner", 20) == "envrunner: 20 are wanted now, in place of 16"
    assert (wanted.read("learner"), wanted.read("envrunner")) == (1, 20)
    assert other.change("learner", 2) == "learner: 2 are wanted now, in place of 1"
    wanted.forget()
    assert not other.are_there


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["here"], "say how many"),
        (["here", "--env-runners", "0"], "--env-runners 0: must be from 1 to 4096"),
        (["here", "--env-runners", "5000"], "must be from 1 to 4096"),
        (["here", "--env-runners", "2"], "is neither HOST:PORT nor the directory of a run"),
    ],
)
def test_what_cannot_be_scaled_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert scale.run(arguments) == 1
    assert said in capsys.readouterr().err
