from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juggler.cli import scale
from juggler.launch.engine import ROLES, Launch, LaunchError
from juggler.launch.ssh import shared_out


def _launch(tmp_path: Path) -> Launch:
    launch = Launch(tmp_path / "run")
    launch.directory.mkdir()
    return launch


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


def test_wanted_numbers_are_read_by_others_until_the_run_is_over(tmp_path: Path) -> None:
    launch = _launch(tmp_path)
    assert not launch.is_running
    launch.begin_counts({"learner": 1, "envrunner": 16, "evaluator": 0})
    other = Launch(tmp_path / "run")
    assert other.scale("envrunner", 20) == "envrunner: 20 instead of 16"
    assert (launch.count("learner"), launch.count("envrunner")) == (1, 20)
    assert other.scale("learner", 2) == "learner: 2 instead of 1"
    launch.forget_counts()
    assert not other.is_running


def test_the_numbers_of_a_launch_that_was_killed_are_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = _launch(tmp_path)
    with launch.read_here():
        launch.begin_counts(dict.fromkeys(ROLES, 1))
        assert scale.run([str(tmp_path / "run"), "--evaluators", "2"]) == 0
        assert launch.count("evaluator") == 2
        again = launch.read_here()
        with pytest.raises(LaunchError, match="started"), again:
            pass
        assert launch.is_running
        left = {path.name: path.read_text() for path in launch.directory.iterdir()}
    assert not list(launch.directory.iterdir())
    for name, text in left.items():  # as after SIGKILL
        (launch.directory / name).write_text(text)
    capsys.readouterr()
    assert scale.run([str(tmp_path / "run"), "--env-runners", "2"]) == 1
    assert "was killed, so its workers" in capsys.readouterr().err
    with launch.read_here():
        assert not launch.is_abandoned, "a launch goes on with the run"


def test_no_link_is_followed_when_wanted_numbers_are_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    launch = _launch(tmp_path)
    (launch.directory / "learner.count.new").symlink_to(victim)
    launch.begin_counts(dict.fromkeys(ROLES, 1))
    (launch.directory / "learner.count.new").symlink_to(victim)
    launch.scale("learner", 2)
    assert launch.count("learner") == 2
    (launch.directory / "reader.lock").symlink_to(victim)
    with pytest.raises(LaunchError, match="cannot write"), launch.read_here():
        pass
    assert not launch.is_abandoned
    launch.count_file("learner").unlink()
    launch.count_file("learner").symlink_to(victim)
    with pytest.raises(LaunchError, match="not a plain file"):
        launch.count("learner")
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("named", ["rm", "kubernetes --all", "kubernetes lab more", "swarm lab"])
def test_an_engine_that_there_is_not_scales_nothing(tmp_path: Path, named: str) -> None:
    launch = _launch(tmp_path)
    launch.begin_counts(dict.fromkeys(ROLES, 1), named)
    with pytest.raises(LaunchError, match="names no engine"):
        launch.scale("learner", 2)
    assert launch.count("learner") == 1
