from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.disk import without_locks

from juggler.cli import scale
from juggler.launch.commands import LaunchError
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
    wanted.begin("evaluator", 0)
    other = Wanted(tmp_path)
    assert other.change("envrunner", 20) == "envrunner: 20 are wanted now, in place of 16"
    assert (wanted.read("learner"), wanted.read("envrunner")) == (1, 20)
    assert other.change("learner", 2) == "learner: 2 are wanted now, in place of 1"
    wanted.forget()
    assert not other.are_there


def test_the_numbers_of_a_launch_that_was_killed_are_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Wanted(tmp_path / "run.launch")
    with wanted.read_here():
        for role in ("learner", "envrunner", "evaluator"):
            wanted.begin(role, 1)
        assert scale.run([str(tmp_path / "run"), "--evaluators", "2"]) == 0
        assert wanted.read("evaluator") == 2
        again = Wanted(wanted.directory).read_here()
        with pytest.raises(LaunchError, match="started"), again:
            pass
        assert wanted.are_there
        left = {path.name: path.read_text() for path in wanted.directory.iterdir()}
    assert not list(wanted.directory.iterdir())
    for name, text in left.items():  # as after SIGKILL
        (wanted.directory / name).write_text(text)
    capsys.readouterr()
    assert scale.run([str(tmp_path / "run"), "--env-runners", "2"]) == 1
    assert "was killed, so nobody starts or ends its workers" in capsys.readouterr().err
    with wanted.read_here():
        assert not wanted.abandoned, "a launch goes on with the run"


def test_a_launch_begins_also_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    wanted = Wanted(tmp_path)
    with wanted.read_here():
        wanted.begin("learner", 1)
        assert not Wanted(tmp_path).abandoned
    assert not list(tmp_path.iterdir())


def test_no_link_is_followed_when_wanted_numbers_are_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    wanted = Wanted(tmp_path / "run.launch")
    wanted.directory.mkdir()
    for name in ("learner.new", "learner.scale"):
        (wanted.directory / name).symlink_to(victim)
    wanted.begin("learner", 1, ["true"])
    (wanted.directory / "learner.new").symlink_to(victim)
    wanted.change("learner", 2)
    assert wanted.read("learner") == 2
    (wanted.directory / "reader.lock").symlink_to(victim)
    with pytest.raises(LaunchError, match="cannot write"), wanted.read_here():
        pass
    assert not wanted.abandoned
    wanted.path("learner").unlink()
    wanted.path("learner").symlink_to(victim)
    with pytest.raises(LaunchError, match="not a plain file"):
        wanted.read("learner")
    assert victim.read_text() == "kept"


def test_a_command_that_another_user_may_have_written_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    umask = os.umask(0o002)
    try:
        wanted = Wanted(tmp_path)
        wanted.begin("learner", 1, ["touch", str(tmp_path / "ran {number}")])
    finally:
        os.umask(umask)
    wanted.change("learner", 2)
    assert (tmp_path / "ran 2").exists()
    command = tmp_path / "learner.scale"
    command.chmod(0o664)
    with pytest.raises(LaunchError, match="another user"):
        wanted.change("learner", 3)
    command.chmod(0o644)
    owner = os.stat_result((0o100644, 0, 0, 1, os.getuid() + 2, 0, 0, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda _: owner)
    with pytest.raises(LaunchError, match="another user"):
        wanted.change("learner", 3)
    assert not (tmp_path / "ran 3").exists()
    assert wanted.read("learner") == 2


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
