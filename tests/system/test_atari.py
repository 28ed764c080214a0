"""Atari by ale-py, from single frames that are stacked in the learner."""

from __future__ import annotations

import json
import sys

import pytest
from support.place import REPOSITORY, Place, assert_books_balance, summary

pytest.importorskip("ale_py", reason="needs ale-py: pip install -e '.[atari]'")


@pytest.mark.long
def test_pong_is_trained_from_single_frames(place: Place) -> None:
    run = place.run("train", "pong", "--run-dir", "run", "--stop-steps", 2000)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    end = summary(place.path / "run")
    assert end["env_steps_trained"] >= 2000
    assert end["updates"] >= 4
    assert end["modules"]["default"]["skipped"] == 0
    played = place.run("evaluate", "run", "--episodes", 1)
    assert played.status == 0, played.output
    assert "1 episode: return -" in played.output, "nobody wins after four updates"
    place.assert_nothing_is_left()


@pytest.mark.long
def test_single_frames_save_the_wire_what_stacks_repeat(place: Place) -> None:
    counted = place.start_program([sys.executable, str(REPOSITORY / "benchmarks" / "atari.py")])
    assert counted.wait(110) == 0, counted.output
    found = json.loads(counted.output.splitlines()[-1])
    assert found["single"] > 84 * 84
    assert found["stacked"] / found["single"] >= 3.5
