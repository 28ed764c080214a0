"""Evaluations on several processes, with videos, and on other hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.place import Place

import juggler
from juggler.driver.watching.videos import find_videos

pytestmark = [pytest.mark.slow]


class Follows(juggler.Callback):
    """Ends the run after two evaluations."""

    def __init__(self) -> None:
        self.evaluations: list[juggler.Evaluation] = []

    def on_evaluation(self, run: juggler.Run, evaluation: juggler.Evaluation) -> None:
        self.evaluations.append(evaluation)
        if len(self.evaluations) == 2:
            run.stop("seen enough")


def test_two_evaluators_share_episodes_and_record_one_more(tmp_path: Path) -> None:
    follows = Follows()
    result = juggler.train(
        "cartpole",
        run_dir=str(tmp_path / "run"),
        callbacks=[follows],
        num_env_runners=1,
        evaluation_seconds=0.5,
        evaluation_episodes=5,
        num_evaluators=2,
        evaluation_video=2,
        stop_return=None,
        stop_seconds=300,
        progress="off",
    )
    assert result.summary["reason_for_stop"] == "seen enough"
    for evaluation in follows.evaluations:
        assert len(evaluation.returns) in (2, 3, 5), "one of the two may be there later"
        assert evaluation.interval[0] <= evaluation.mean <= evaluation.interval[1]
    assert len(follows.evaluations[-1].returns) == 5
    first = follows.evaluations[0].update
    (video,) = find_videos(tmp_path / "run")
    assert video.name.startswith(f"videos/update-{first:09}/")
    assert video.path.read_bytes()[4:8] == b"ftyp", "an MP4"


def test_an_evaluator_that_dials_in_plays_the_newest_weights(place: Place) -> None:
    options = ["--stop-return", "none", "--stop-steps", 40_000, "--evaluation-seconds", 0.5]
    options += ["--bind", "127.0.0.1:0", "--run-dir", "run"]
    driver = place.start("driver", "cartpole", *options)
    driver.wait_for("waiting for workers at")
    line = next(line for line in driver.output.splitlines() if "waiting for workers" in line)
    address = line.split()[-1]
    roles = ("evaluator", "learner", "envrunner")
    workers = [place.start(role, "--driver", address) for role in roles]
    assert driver.wait(110) == 0, driver.output
    for worker in workers:
        assert worker.wait(60) == 0, worker.output
    lines: list[dict[str, Any]] = [
        json.loads(text) for text in (place.path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["evaluation_return_mean"] is not None, driver.output
    assert not (place.path / "run" / "best").exists()
    place.assert_nothing_is_left()
