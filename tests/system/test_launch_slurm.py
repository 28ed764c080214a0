"""`juggler launch slurm` on a real Slurm of one node."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.place import (
    Command,
    Place,
    assert_books_balance,
    checkpoints,
    env_runners,
    eventually,
    metrics,
    summary,
    trained_steps,
    workers_in,
)
from support.slurm import Slurm, missing

from juggler.launch.commands import Launch


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    made = Slurm(directory)
    yield made
    made.close()
    shutil.rmtree(directory)


def _launch(place: Place, slurm: Slurm, *options: str) -> Command:
    own = ["--env-runners", "2", "--run-dir", "run", "--time", "00:30:00"]
    return place.start("launch", "slurm", "cartpole", *own, *options, **slurm.environment)


@pytest.mark.long
def test_a_run_of_jobs_is_solved_and_leaves_no_job(place: Place, slurm: Slurm) -> None:
    launch = _launch(place, slurm, "--run-dir", "my 1st %j run")
    assert launch.wait(120) == 0, launch.output
    assert "solved: return" in launch.output
    assert_books_balance(place.path / "my 1st %j run")
    slurm.wait_until(lambda: not slurm.jobs(), "no job is left")


@pytest.mark.slow
def test_a_run_of_jobs_outlives_a_killed_worker_and_its_time_limit(
    place: Place, slurm: Slurm
) -> None:
    run_dir = place.path / "run"
    launch = _launch(place, slurm, "--", "--stop-return", "501", "--checkpoint-seconds", "1")
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: launch.output)
    eventually(lambda: trained_steps(run_dir) > 0, 60, lambda: launch.output)
    workers_in(place.path, "envrunner")[0].kill()
    eventually(lambda: env_runners(run_dir) == 1, 30, lambda: launch.output)
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: launch.output)

    lost = metrics(run_dir)[-1]["env_steps_lost_unreported"]  # with the one that was killed
    assert place.run("scale", "run", "--env-runners", "3").status == 0
    eventually(lambda: env_runners(run_dir) == 3, 60, lambda: launch.output)
    assert place.run("scale", "run", "--env-runners", "1").status == 0
    eventually(lambda: env_runners(run_dir) == 1, 60, lambda: launch.output)
    events = (run_dir / "events.jsonl").read_text()
    assert events.count("left: terminated") == 2, "in order, both of them"
    assert metrics(run_dir)[-1]["env_steps_lost_unreported"] == lost

    # What Slurm does two minutes before the time limit, at which it would end the job.
    before = len(checkpoints(run_dir))
    name = f"{Launch(run_dir, '').label}-driver"
    slurm.ask("scancel", "--batch", "--signal=USR1", f"--name={name}")
    slurm.wait_until(lambda: any("PENDING" in each for each in slurm.jobs(name)), "it queues again")
    assert len(checkpoints(run_dir)) >= min(before, 1)
    trained = summary(run_dir)["env_steps_trained"]
    job = slurm.ask("squeue", "--noheader", f"--name={name}", "--format=%A").strip()
    # Slurm lets it wait for two minutes. It needs those until the former job is gone, and a second
    # more: a credential from the second in which the former one was revoked does not hold.
    slurm.wait_until(lambda: not slurm.runs(job), "the former job is gone")
    time.sleep(2.5)
    slurm.ask("scontrol", "update", f"jobid={job}", "starttime=now")
    eventually(lambda: trained_steps(run_dir) > trained, 90, lambda: launch.output)

    launch.process.terminate()
    assert launch.wait(120) == 143, launch.output
    assert_books_balance(run_dir)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["env_steps_trained"] > trained
    slurm.wait_until(lambda: not slurm.jobs(), "no job is left")
