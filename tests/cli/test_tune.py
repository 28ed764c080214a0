"""`juggler tune`: what it measures, and what it makes of that."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from support.commands import status_of
from support.slow_environments import loop

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.core.room import Room
from juggler.driver.given_config import load_config
from juggler.driver.preflight import PreflightError
from juggler.experiments.tuning import advice as process
from juggler.experiments.tuning import measuring
from juggler.experiments.tuning.advice import advice_for, lines_of, write
from juggler.experiments.tuning.measuring import Measurements, usual_seconds
from juggler.experiments.tuning.speeds import (
    Sampling,
    Sizes,
    Speeds,
    Transport,
    Updating,
    advised,
    expected,
)
from juggler.runtime.actors import processes
from juggler.runtime.actors.processes import WorkerProgram


def speeds(
    *,
    cores: float = 4,
    share: float = 1.0,
    most_runners: int = 100,
    step: float = 1e-4,
    each: float = 1e-6,
    busy: float = 1.0,
    update: float = 1e-3,
    of_step: float = 2e-6,
) -> Speeds:
    """A machine on which times grow in proportion to sizes, and sending costs nothing."""
    sampling = [
        Sampling(n, step + each * n, busy * (step + each * n), each * n, step, live=1.0)
        for n in (1, 4, 16, 64, 256)
    ]
    updating = [
        Updating(steps, update + of_step * steps, update + of_step * steps)
        for steps in (512, 1024, 2048, 4096, 8192)
    ]
    return Speeds(cores, share, most_runners, sampling, updating, Transport(40.0, 0.0, 0.0))


def test_the_slower_of_two_sides_decides_what_is_expected() -> None:
    learner = expected(speeds(), Sizes(2, 64, 32, 2048), synchronous=False)
    assert learner.rate == pytest.approx(2048 / (1e-3 + 2e-6 * 2048))
    assert learner.limit == "the learner"
    runner = expected(speeds(), Sizes(1, 4, 32, 2048), synchronous=False)
    assert runner.rate == pytest.approx(4 / (1e-4 + 4e-6))
    assert runner.limit == "the EnvRunners"


def test_in_synchronous_runs_both_sides_take_turns() -> None:
    found = expected(speeds(), Sizes(1, 64, 32, 2048), synchronous=True)
    sampling, updating = (1e-4 + 64e-6) / 64, (1e-3 + 2e-6 * 2048) / 2048
    assert found.rate == pytest.approx(1 / (sampling + updating))


def test_processes_share_the_cores() -> None:
    many = expected(speeds(cores=1, update=0, of_step=0), Sizes(8, 64, 32, 2048), synchronous=False)
    assert many.limit == "the cores"
    alone = 64 / (1e-4 + 64e-6)
    assert 0.9 * alone < many.rate < alone  # the driver takes some of it


def test_other_work_takes_its_share_of_the_cores() -> None:
    sizes = Sizes(8, 64, 32, 2048)
    half, one = (
        expected(speeds(cores=cores, share=share, update=0, of_step=0), sizes, synchronous=False)
        for cores, share in ((2, 0.5), (1, 1.0))
    )
    assert half == one
    assert half.limit == "the cores"


def test_environments_that_are_kept_from_a_core_do_not_wait_for_something_else() -> None:
    # Of each second of wall time, environments compute for a third, and so does all else.
    kept = speeds(cores=3, share=1 / 3, busy=1 / 3)
    assert not kept.wait
    assert best(kept, Sizes(1, 1, 32, 8192)).runners <= 3
    assert speeds(busy=1 / 3).wait


def best(
    found: Speeds, now: Sizes, batch_sizes: tuple[int, ...] = (), *, synchronous: bool = False
) -> Sizes:
    return advised(
        found,
        now,
        synchronous=synchronous,
        open_updates=3,
        learners=1,
        allowed=lambda sizes: True,
        batch_sizes=batch_sizes or (now.batch_size,),
    ).sizes


def test_the_fewest_processes_that_keep_the_learner_busy_are_advised() -> None:
    assert best(speeds(), Sizes(2, 4, 32, 2048)) == Sizes(1, 64, 32, 2048)
    slower = speeds(step=4e-4)
    assert best(slower, Sizes(2, 4, 32, 2048)) == Sizes(3, 64, 32, 2048)


def test_synchronous_runs_are_advised_several_runners_whose_batches_are_one_update() -> None:
    slow = speeds(step=0.0, each=1e-4)
    alone = Sizes(1, 64, 32, 2048)
    found = best(slow, alone, synchronous=True)
    assert found.runners == 4
    assert found.runners * found.fragment <= 1.1 * 2048
    rate = expected(slow, found, synchronous=True).rate
    assert rate > 3 * expected(slow, alone, synchronous=True).rate


def test_a_synchronous_update_has_a_batch_of_every_runner() -> None:
    costly = speeds(step=0.0, each=0.0, of_step=0.0, update=1.0)
    one, four = (
        expected(costly, Sizes(runners, 64, 32, 2048), synchronous=True).rate for runners in (1, 4)
    )
    assert four == pytest.approx(4 * one)


def test_no_more_runners_are_advised_than_sample_at_once() -> None:
    waiting = speeds(step=1e-2, each=0.0, busy=0.02)
    sizes = best(waiting, Sizes(1, 256, 32, 7500))
    assert sizes == Sizes(3, 256, 32, 7500), "each fragment is an update"
    assert sizes.runners == Room(updates=3, batch_size=7500).batches(sizes.fragment)


def with_threads(found: Speeds, gain: float, cpu: float) -> Speeds:
    """The same machine, on which updates by two threads are `gain` times as fast, and take `cpu`
    times the processor time."""
    more = [
        Updating(each.steps, each.seconds / gain, each.cpu * cpu, threads=2)
        for each in found.updating
    ]
    return replace(found, updating=[*found.updating, *more])


def test_a_learner_that_is_the_limit_gets_idle_cores() -> None:
    now = Sizes(1, 64, 32, 2048)
    slow = speeds(update=1e-2)
    assert expected(slow, now, synchronous=False).limit == "the learner"
    assert best(with_threads(slow, 1.8, 1.1), now) == replace(now, threads=2)
    assert best(with_threads(slow, 1.02, 2.0), now) == now, "a twentieth at least"
    no_core_is_idle = speeds(update=1e-2, cores=1)
    assert best(with_threads(no_core_is_idle, 1.8, 1.1), now).threads == 1
    as_configured = expected(
        with_threads(slow, 1.8, 1.1), replace(now, threads=2), synchronous=False
    )
    assert as_configured.rate > 1.7 * expected(slow, now, synchronous=False).rate


def test_sizes_that_are_good_enough_stay() -> None:
    now = Sizes(2, 48, 32, 2048)
    assert best(speeds(), now) == now


def test_a_batch_is_not_larger_than_an_update() -> None:
    found = best(speeds(step=1e-2), Sizes(1, 1, 32, 512))
    assert found.fragment <= 1.1 * 512
    assert found.batch_size == 512


def test_environments_that_wait_get_more_processes_than_there_are_cores() -> None:
    waiting = speeds(step=0.0, each=2e-3, busy=0.02)
    sizes = best(waiting, Sizes(1, 1, 32, 8192))
    assert sizes.runners > 20
    few = speeds(step=0.0, each=2e-3, busy=0.02, most_runners=5)
    assert best(few, Sizes(1, 1, 32, 8192)).runners == 5


def test_an_update_keeps_its_size_where_the_algorithm_learns_from_its_own_steps() -> None:
    slow_updates = speeds(update=2e-2, of_step=0)
    for algorithm, stays in (("impala", True), ("ppo", True), ("dqn", False)):
        config = RunConfig.from_flat({"algorithm": algorithm, "batch_size": 1024})
        advice = advice_for(config, frozenset(), slow_updates)
        assert (advice.best.sizes.batch_size == 1024) == stays
        assert ("batch_size stays" in "\n".join(lines_of(advice))) == stays
        if stays:
            assert advice.larger is not None
            assert advice.larger.sizes.batch_size > 1024
            assert advice.larger.rate > 1.2 * advice.best.rate


def test_the_file_has_the_sizes_and_what_is_not_as_by_default(tmp_path: Path) -> None:
    config = RunConfig.from_flat({"lr": 3e-4, "num_env_runners": 2, "envs_per_runner": 4})
    given = {"lr", "env", "num_env_runners", "hang_seconds", "algorithm"}
    advice = advice_for(config, given, speeds())
    write(advice, tmp_path / "tuned.toml")
    text = (tmp_path / "tuned.toml").read_text()
    assert text.startswith("# ")
    keys = {line.partition(" = ")[0] for line in text.splitlines() if " = " in line}
    assert keys == {
        *("lr", "env", "num_env_runners", "envs_per_runner", "fragment_steps", "batch_size"),
        *("algorithm", "learner_threads"),
    }, "hang_seconds has its default"
    again = load_config(tmp_path / "tuned.toml")
    assert again.learner.lr == 3e-4
    assert again.env_runner.envs_per_runner == advice.best.sizes.environments


def fragment(wall: float, cpu: float) -> dict[str, float]:
    return {"wall": wall, "cpu": cpu, "environment": wall / 2, "inference": wall / 4}


def test_slow_resets_count_though_few_fragments_have_them() -> None:
    usual = usual_seconds([fragment(0.01, 0.01)] * 9 + [fragment(1.01, 0.5)], waited=0.0)
    assert usual["wall"] == pytest.approx(0.11)
    assert usual["environment"] == pytest.approx(0.055)
    assert usual["cpu"] == pytest.approx(0.059)


def test_a_fragment_that_other_work_holds_up_does_not_count() -> None:
    usual = usual_seconds([fragment(0.01, 0.01)] * 9 + [fragment(1.01, 0.01)], waited=1.0)
    assert usual["wall"] == pytest.approx(0.01)
    assert usual["inference"] == pytest.approx(0.0025)


@pytest.mark.usefixtures("local_workers")
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [pytest.param("impala", marks=pytest.mark.long), "dqn"])
def test_it_measures_a_real_environment_and_writes_what_train_takes(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tuned.toml"
    keys = ("--envs-per-runner", 2, "--fragment-steps", 8, "--batch-size", 64, "--lr", 0.01)
    given = ("--env", "CartPole-v1", "--algorithm", algorithm, *keys)
    assert status_of("tune", *given, "--seconds", 1, "--write", file) == 0
    said = capsys.readouterr()
    assert "an EnvRunner with 2 environments: " in said.err
    assert "an update of " in said.err
    assert "sending a batch of " in said.err
    assert "as configured: 2 × 2 environments, 8 steps: about " in said.out
    assert f"juggler train {file}" in said.out
    config = load_config(file)
    assert config.learner.lr == 0.01
    assert config.learner.algorithm == algorithm
    # An existing file stays.
    before = file.read_bytes()
    assert status_of("tune", *given, "--seconds", 1, "--write", file) == 2
    assert "it is there, and is not overwritten" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--write", "nowhere/tuned.toml"), "--write nowhere/tuned.toml: there is no directory"),
        (("--gateway", "127.0.0.1:0"), "juggler tune: only environments of this host with one"),
        (("--league", "self_play"), "this run has a table for several agents or modules"),
        (("--env", "dm_env_rpc://127.0.0.1:9"), "are elsewhere"),
        (("--seconds", "0.1"), "--seconds must be at least 1"),
        (("--seconds", "nan"), "--seconds must be at least 1"),
        (("--env", "CartPol-v1"), "Nearest: CartPole-v1"),
    ],
)
@pytest.mark.usefixtures("local_workers")
def test_what_cannot_be_measured_is_said(
    options: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("tune", *options) == 2
    assert why in capsys.readouterr().err


@pytest.mark.usefixtures("local_workers")
def test_several_agents_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("tune", "--env", "juggler:CartPoles", "--seconds", 1) == 2
    assert "has several agents" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("local_workers")
def test_of_slow_environments_only_a_few_are_measured_and_the_others_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_PROGRESS_SECONDS", 0.05)
    env = "support.slow_environments:Slow"
    assert status_of("tune", "--env", env, "--envs-per-runner", 16, "--seconds", 1) == 0
    said = capsys.readouterr()
    assert re.search(rf"making steps of {env} with 1 environment: \d+ s so far", said.err)
    assert "left out: EnvRunners with 4, 16, 64 or 256 environments, which take too" in said.err
    assert "as configured: 2 × 16 environments" in said.out


def test_environments_too_slow_for_one_measurement_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_MORE_SECONDS", 0.2)
    env = "support.slow_environments:TooSlow"
    config = RunConfig.from_flat({"env": env, "envs_per_runner": 1})
    measurements = Measurements(config, 1.0, lambda _: None, lambda _: None)
    with pytest.raises(ConfigError, match="longer"):
        measurements.all()


@pytest.mark.long
@pytest.mark.usefixtures("local_workers")
def test_an_environment_that_ends_its_process_is_named_with_how_it_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = "support.slow_environments:Leaving"
    assert status_of("tune", "--env", env, "--seconds", 1) == 2
    told = f"its process ended while making steps of {env} with 1 environment: exit code 3"
    assert told in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("local_workers")
def test_a_process_that_hangs_where_no_python_code_runs_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = []

    def start(program: WorkerProgram, title: str) -> ForkServerProcess:
        task: Any = program.argument
        task.told.send(("does", "making steps"))
        begun.append(processes.start(WorkerProgram(f"{loop.__module__}:loop", task), title))
        return begun[0]

    monkeypatch.setattr(process, "start", start)
    monkeypatch.setattr(process, "_PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(process, "_MORE_SECONDS", 0.0)
    with pytest.raises(PreflightError, match="making"):
        process.measure(RunConfig.from_flat({"env": "CartPole-v1"}), 0.0, lambda _: None)
    assert begun[0].exitcode == -signal.SIGKILL
