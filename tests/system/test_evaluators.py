"""Evaluations on several processes, with videos, and on other hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.place import Place, eventually, metrics

import juggler
from juggler.driver.watching.watched_run import find_videos

pytestmark = [pytest.mark.slow]


class Follows(juggler.Callback):
    """Ends the run after two evaluations."""

    def __init__(self) -> None:
        self.evaluations: list[juggler.Evaluation] = []

    def on_evaluation(self, run: juggler.Run, evaluation: juggler.Evaluation) -> None:
        self.evaluations.append(evaluation)
        if len(self.evaluations) == 2:
            run.stop("seen enough")


@pytest.mark.long
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
        assert evaluation.interval is not None
        low, high = evaluation.interval
        assert low <= evaluation.mean <= high
    assert len(follows.evaluations[-1].returns) == 5
    # The third one may have begun, and none of the second one is recorded.
    first, second = (f"videos/update-{each.update:09}/" for each in follows.evaluations)
    videos = find_videos(tmp_path / "run")
    (video,) = (each for each in videos if each.name.startswith(first))
    assert second == first or not any(each.name.startswith(second) for each in videos)
    assert video.path.read_bytes()[4:8] == b"ftyp", "an MP4"


def test_an_evaluator_that_dials_in_leaves_the_best_checkpoint(place: Place) -> None:
    options = ["--stop-return", "none", "--evaluation-seconds", 0.5]
    options += ["--bind", "127.0.0.1:0", "--run-dir", "run"]
    driver = place.start("driver", "cartpole", *options)
    address = driver.address()
    roles = ("evaluator", "learner", "envrunner")
    workers = [place.start(role, "--driver", address) for role in roles]
    best = place.path / "run" / "best"
    # Of update 0 it may be there before an EnvRunner is.
    eventually(lambda: any(int(each.name) for each in best.glob("0*")), 90, lambda: driver.output)
    driver.interrupt()
    assert driver.wait(60) == 130, driver.output
    for worker in workers:
        assert worker.wait(60) == 0, worker.output
    record = json.loads(next(best.glob("0*/evaluation.json")).read_text())
    assert record["episodes"] == 10
    assert record["return_mean"] >= metrics(place.path / "run")[-1]["evaluation_return_mean"]
    assert juggler.evaluate(best, episodes=2).mean > 0
    place.assert_nothing_is_left()
