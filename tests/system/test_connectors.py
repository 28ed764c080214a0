"""Parts of one's own by their names, on workers that dial in."""

from __future__ import annotations

import json
import sys

import pytest
from support.place import REPOSITORY, Place, assert_books_balance, first_of, metrics, summary

EXAMPLES = REPOSITORY / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["custom_module", "custom_connector"]))
def test_a_part_of_ones_own_works_on_workers_that_dial_in(place: Place, name: str) -> None:
    path = {"PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}"}
    options = ["--bind", "127.0.0.1:0", "--run-dir", "run", "--stop-steps", 20_000]
    driver = place.start("driver", EXAMPLES / f"{name}.toml", *options)
    dial = ["--driver", driver.address()]
    workers = [place.start(role, *dial, **path) for role in ("learner", "envrunner")]
    assert driver.wait(110) == 0, driver.output
    for worker in workers:
        assert worker.wait(60) == 0, worker.output
    assert summary(place.path / "run")["env_steps_trained"] >= 20_000
    assert_books_balance(place.path / "run")
    played = place.run("evaluate", "run", "--episodes", 2, **path)
    assert played.status == 0, played.output
    place.assert_nothing_is_left()


# Weights that leave the learner at intervals, and in half the bits.


SCRIPT = """
import json, resource
import juggler
from juggler.driver.record.workers import WorkerRecords

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
stamped = set()
sampled = WorkerRecords.sampled

def note(self, worker_id, steps, version):
    if worker_id.startswith("envrunner"):
        stamped.add(version.update)
    sampled(self, worker_id, steps, version)

WorkerRecords.sampled = note
juggler.train(
    "cartpole", run_dir="run", stop_return=150, stop_seconds=90, checkpoint_seconds=1000,
    weights_interval=3, weights_dtype="bfloat16", max_staleness=12, progress="off",
)
print(json.dumps(sorted(stamped)))
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""


@pytest.mark.slow
def test_a_run_learns_from_what_every_third_version_of_rounded_weights_does(place: Place) -> None:
    run = place.start_program([sys.executable, str(place.write("script.py", SCRIPT))])
    assert run.wait(110) == 0, run.output
    stamped, many_open_files = map(json.loads, run.output.lower().splitlines())
    directory = place.path / "run"
    end = summary(directory)
    assert end["solved"], end
    assert_books_balance(directory)
    # None are where nothing else keeps the machine busy; a runner may be held up for a moment.
    assert end["env_steps_dropped"].get("stale", 0) <= 0.01 * end["env_steps_trained"]
    oldest = max(line["staleness_max"] or 0 for line in metrics(directory))
    assert 2 <= oldest <= 12
    # Weights are published with a checkpoint that has them: a candidate's, and the last ones.
    with_checkpoints = {end["updates"], end["confirmation"]["update"]}
    in_the_course = [update for update in stamped if update not in with_checkpoints]
    assert len(in_the_course) > 10
    assert all(update % 3 == 0 for update in in_the_course), stamped
    assert many_open_files
    place.assert_nothing_is_left()
