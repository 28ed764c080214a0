"""A sweep with the real Optuna over scripted runs."""

from __future__ import annotations

import csv
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from gymnasium import spaces
from support.place import status_of
from support.small_cores import action_space_of, keeps_steps, needs_memory

import juggler
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import load_config_and_keys
from juggler.driver.reporting.run_directory import RunDirectoryError
from juggler.experiments import sweep
from juggler.experiments.runs import RunExit
from juggler.experiments.space import Axis, parse_space, placed
from juggler.experiments.sweep import SweepFailed, SweepPlan, must_be_a_metric
from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
from juggler.runtime.modules.module_specs import build_module
from juggler.testing import sample_for

RUNS = {"stop_steps": 1000, "progress": "plain", "num_env_runners": 1, "value_coefficient": 0.0}


def scripted(directory: Path, space: dict[str, Any], **how: Any) -> Any:
    return juggler.sweep("cartpole", space=space, run_dir=str(directory), **{**RUNS, **how})


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def states(directory: Path) -> list[str]:
    storage = f"sqlite:///{directory / 'study.db'}"
    return [each.state.name for each in optuna.load_study(study_name=None, storage=storage).trials]


@pytest.mark.usefixtures("scripted_runs")
def test_the_best_settings_are_found_and_written_as_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"lr": [1.0, 3.0, 2.0], "model.hidden_sizes": [[8], [16, 16]]}
    found = scripted(tmp_path / "sweep", space, trials=12, jobs=3, prune=False)
    assert found.settings["lr"] == 3.0
    assert found.value == pytest.approx(30.0)
    best = tomllib.loads(found.config.read_text())
    assert best["model"]["hidden_sizes"] == found.settings["model.hidden_sizes"] in ([8], [16, 16])
    assert best.keys() >= {"env", "algorithm", "lr", "model", "value_coefficient"}
    assert len(best) < 20, "only what differs from the defaults"
    config = RunConfig.from_flat(best)
    shipped = load_config_and_keys("cartpole")[0].flat()
    assert {key for key, value in config.flat().items() if value != shipped[key]} <= {
        *("lr", "model", "value_coefficient", "num_env_runners", "progress")
    }
    assert (config.learner.lr, config.driver.stop_return, config.driver.stop_steps) == (
        *(3.0, 475.0),
        None,
    ), "the configuration's own goal, and not the length of a trial"
    for row in rows(tmp_path / "sweep"):
        assert float(row["episode_return_mean"]) == pytest.approx(10 * float(row["lr"]))
    assert [row["trial"] for row in rows(tmp_path / "sweep")] == [str(i) for i in range(6)]
    pictures = [tmp_path / "sweep" / name for name in ("sweep.png", "history.png")]
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in pictures)
    said = capsys.readouterr().out
    assert "sweep of 6 trials, one of each setting, 3 at once, in" in said
    assert "6 trials complete, 0 pruned, 0 failed" in said
    table = said.partition("0 failed\n")[2].splitlines()
    assert table[0].split() == [
        *("trial", "episode_return_mean", "lr", "model.hidden_sizes", "ended")
    ]
    assert table[1].split()[1:3] == ["30.00", "3"], "the best one first"
    assert all(each.name in said for each in pictures)


@pytest.mark.usefixtures("scripted_runs")
def test_no_setting_of_a_list_comes_twice_and_the_last_one_ends_the_sweep(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    space = {"lr": [1.0, 2.0, 3.0], "learner_threads": "1..2"}
    scripted(directory, space, trials=5, jobs=2, prune=False)
    assert len({(row["lr"], row["learner_threads"]) for row in rows(directory)}) == 5
    found = juggler.resume_sweep(directory, trials=40)
    assert found.settings["lr"] == 3.0
    assert len(rows(directory)) == 6
    assert len({(row["lr"], row["learner_threads"]) for row in rows(directory)}) == 6


@pytest.mark.usefixtures("scripted_runs")
def test_trials_that_fall_behind_are_ended_and_told(tmp_path: Path) -> None:
    """The lowest returns are below the median from the third tenth on."""
    slow = {"value_coefficient": 1.0}
    space = {"lr": [*range(1, 7), *range(51, 57)]}
    scripted(tmp_path / "sweep", space, trials=12, jobs=4, **slow)
    pruned = [row for row in rows(tmp_path / "sweep") if row["ended"].startswith("pruned after")]
    assert pruned
    assert states(tmp_path / "sweep").count("PRUNED") == len(pruned)
    for row in pruned:
        run = tmp_path / "sweep" / "trials" / f"{int(row['trial']):03}"
        assert list((run / "checkpoints").iterdir()), "it ended in order"
    lengths = [lines(tmp_path / "sweep", int(row["trial"])) for row in pruned]
    assert min(lengths) < 10, "before its end"


@pytest.mark.usefixtures("scripted_runs")
def test_a_killed_trial_is_told_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = scripted(tmp_path / "sweep", {"gamma": [0.5, 0.9], "lr": [1.0, 2.0]}, trials=8)
    killed = [row for row in rows(tmp_path / "sweep") if row["gamma"] == "0.5"]
    assert {row["ended"] for row in killed} == {"failed: ended by SIGKILL"}
    assert {row["episode_return_mean"] for row in killed} == {""}, "it was going to have another"
    assert found.settings["gamma"] == 0.9
    assert f"0 pruned, {len(killed)} failed" in capsys.readouterr().out


@pytest.mark.usefixtures("scripted_runs")
def test_a_sweep_whose_first_trials_all_fail_ends_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(SweepFailed, match="trials"):
        scripted(tmp_path / "sweep", {"lr": "1..2"}, trials=40, gamma=0.25)
    assert {row["ended"] for row in rows(tmp_path / "sweep")} == {
        "failed: juggler train: the mast is broken"
    }
    assert len(rows(tmp_path / "sweep")) == 3


@pytest.mark.usefixtures("scripted_runs")
def test_a_sum_of_returns_that_is_always_0_names_no_best_trial(tmp_path: Path) -> None:
    with pytest.raises(SweepFailed, match="episode_return"):
        scripted(tmp_path / "sweep", {"lr": "1..2"}, trials=40, gamma=0.75)
    assert len(rows(tmp_path / "sweep")) == 3
    assert {row["episode_return_mean"] for row in rows(tmp_path / "sweep")} == {""}
    assert not (tmp_path / "sweep" / "best.toml").exists()


@pytest.mark.usefixtures("scripted_runs")
def test_ctrl_c_ends_trials_in_order_and_a_resumed_sweep_goes_on_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "sweep"
    with pytest.raises(KeyboardInterrupt):
        scripted(directory, {"lr": "1..2"}, trials=3, jobs=2, reward_scale=2.0)
    assert f"to resume: juggler sweep --resume {directory}" in capsys.readouterr().out
    assert states(directory) == ["RUNNING", "RUNNING"]
    settings = [tomllib.loads((directory / f"trials/00{i}.toml").read_text()) for i in (0, 1)]
    (directory / "trials/000/config.toml").write_text(f"lr = {settings[0]['lr']}")  # waits no more
    (directory / "trials/001/config.toml").write_text(f"lr = {settings[1]['lr']}")
    plan = directory / "sweep.toml"
    plan.write_text(plan.read_text().replace("reward_scale = 2.0", "reward_scale = 1.0"))

    assert status_of("sweep", "--resume", directory, "--trials", 4) == 0
    assert [row["ended"] for row in rows(directory)] == ["complete"] * 4
    for row, before in zip(rows(directory), settings, strict=False):
        assert float(row["lr"]) == pytest.approx(before["lr"])
        assert lines(directory, int(row["trial"])) == 10, "its run continued, and did not restart"
    assert len({row["lr"] for row in rows(directory)}) == 4


@pytest.mark.usefixtures("scripted_runs")
def test_a_sweep_that_was_killed_can_be_resumed(tmp_path: Path) -> None:
    """Optuna then has unfinished trials, perhaps one without a run."""
    directory = tmp_path / "sweep"
    scripted(directory, {"lr": "1..2"}, trials=2)
    storage = f"sqlite:///{directory / 'study.db'}"
    study = optuna.load_study(study_name=None, storage=storage)
    study.ask()
    half = study.ask()
    half.set_user_attr("run", 2)
    half.suggest_float("lr", 1.0, 2.0)
    found = juggler.resume_sweep(directory, trials=4)
    assert found is not None
    assert [row["trial"] for row in rows(directory)] == ["0", "1", "2", "3"]
    assert len(found.trials) == 4


@pytest.mark.usefixtures("scripted_runs")
def test_one_process_at_a_time_has_a_sweep(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    scripted(directory, {"lr": "1..2"}, trials=1)
    with (directory / "sweep.toml").open() as file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match="another process is at work in"):
            juggler.resume_sweep(directory)
    with pytest.raises(RunDirectoryError, match="is not empty"):
        scripted(directory, {"lr": "1..2"}, trials=1)
    with pytest.raises(RunDirectoryError, match="sweep"):
        juggler.resume_sweep(tmp_path)


def test_without_optuna_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="install"):
        scripted(tmp_path / "sweep", {"lr": "1..2"})
    assert not (tmp_path / "sweep").exists()


@pytest.mark.long
def test_a_sweep_of_real_runs_ends_with_a_configuration_that_trains(tmp_path: Path) -> None:
    found = juggler.sweep(
        "cartpole",
        space={"lr": "1e-4..1e-2:log", "entropy_coefficient": "0,0.01"},
        trials=2,
        jobs=2,
        run_dir=str(tmp_path / "sweep"),
        stop_steps=4000,
        progress="off",
    )
    assert found is not None
    assert {row["ended"] for row in found.trials} == {"complete"}
    for row in found.trials:
        run = tmp_path / "sweep" / "trials" / f"{row['trial']:03}"
        config = tomllib.loads((run / "config.toml").read_text())
        assert config["lr"] == row["lr"], "the run had its trial's settings"
    keys = {"stop_steps": 1000, "run_dir": str(tmp_path / "run"), "progress": "off"}
    assert juggler.train(found.config, **keys).summary["env_steps_trained"] >= 1000


def lines(directory: Path, number: int) -> int:
    """How many lines of metrics a trial has."""
    file = directory / "trials" / f"{number:03}" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


# Which trials of a sweep are pruned, with the real Optuna and lines of metrics as they come.


METRIC = "episode_return_mean"
STEPS = 100


@dataclass(eq=False)
class Run:
    """A run whose lines the test writes."""

    config: Path
    run_dir: Path
    lines: list[dict[str, float]] = field(default_factory=list)
    stopped: bool = False

    def new_lines(self) -> Iterator[dict[str, float]]:
        while self.lines:
            yield self.lines.pop(0)

    def stop(self) -> None:
        self.stopped = True


class Trials:
    """The trials of a sweep, one after the other."""

    def __init__(self, directory: Path) -> None:
        run: dict[str, Any] = {
            "env": "CartPole-v1",
            "stop_steps": STEPS,
            "stop_return": "none",
            "progress": "off",
        }
        plan = SweepPlan(
            run=run,
            stops={},
            space={"lr": "1..2"},
            metric=METRIC,
            minimize=False,
            prune=True,
            trials=99,
        )
        axes = parse_space(plan.space, run)
        directory.mkdir()
        self._sweep = sweep.Sweep(directory, plan, axes, jobs=1)
        self._sweep.begin()

    def is_pruned(self, *points: tuple[int, float | None]) -> bool:
        """Have a trial.

        Args:
            points: for each of its lines, the steps and the return.
        """
        run: Any = self._sweep.next()
        run.lines = [{"env_steps_trained": at, METRIC: value} for at, value in points]
        self._sweep.read_new(run)
        summary = {METRIC: points[-1][1]}
        self._sweep.over(run, RunExit(summary, interrupted=run.stopped, problem=""))
        return bool(run.stopped)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    create = optuna.create_study
    # SQLite would wait for the disk.
    monkeypatch.setattr(optuna, "create_study", lambda *, storage, **how: create(**how))
    monkeypatch.setattr(sweep, "RunProcess", Run)
    return Trials(tmp_path / "sweep")


def test_a_trial_is_compared_with_those_that_had_no_line_in_its_tenth(trials: Trials) -> None:
    """Lines come once a second; a short trial's tenth takes less."""
    assert not trials.is_pruned((35, 50.0), (65, 80.0), (100, 100.0))  # the best one
    for _ in range(4):
        assert not trials.is_pruned((25, 5.0), (55, 10.0), (100, 15.0))
    assert not trials.is_pruned((36, 30.0), (66, 50.0), (100, 80.0)), "the second of six"


def test_a_tenth_without_a_line_counts_with_what_was_known_by_then(trials: Trials) -> None:
    for _ in range(5):
        assert not trials.is_pruned((28, 28.0), (58, 58.0), (100, 100.0))
    assert not trials.is_pruned((30, 31.0), (60, 61.0), (100, 101.0)), "the best of six"
    assert trials.is_pruned((20, 20.0), (50, 27.0)), "behind the ones that last reported 28"


def test_no_trial_is_pruned_by_few_that_had_a_return_so_early(trials: Trials) -> None:
    assert not trials.is_pruned((35, 50.0), (100, 100.0))
    for _ in range(4):
        assert not trials.is_pruned((35, None), (55, 10.0), (100, 15.0))
    assert not trials.is_pruned((36, 30.0), (100, 80.0))


def test_nothing_is_pruned_before_five_trials_are_complete(trials: Trials) -> None:
    tenths = range(10, 101, 10)
    for _ in range(4):
        assert not trials.is_pruned(*((at, 10.0 * at) for at in tenths))
    assert not trials.is_pruned(*((at, float(at)) for at in tenths))
    for _ in range(2):
        assert trials.is_pruned(*((at, float(at)) for at in tenths)), "pruned ones do not count"


# The space of a sweep, and the metrics that it may name.


LR_BOUNDS = {"low": 1e-4, "high": 1e-2, "step": None, "whole": False}


@pytest.mark.parametrize(
    ("key", "text", "meant"),
    [
        ("lr", "1e-4..1e-2:log", Axis("lr", log=True, **LR_BOUNDS)),
        ("lr", "1e-4 .. 1e-2", Axis("lr", log=False, **LR_BOUNDS)),
        ("batch-size", "256..1024:256", Axis("batch_size", (), 256, 1024, False, 256, True)),
        ("batch-size", "256..2048:300", Axis("batch_size", (), 256, 1756, False, 300, True)),
        ("gamma", "0.1..0.95:0.2", Axis("gamma", (), 0.1, 0.9, False, 0.2, False)),
        ("gamma", "0.1..0.3:0.2", Axis("gamma", (), 0.1, 0.3, False, 0.2, False)),
        ("gamma", "0..1", Axis("gamma", (), 0, 1, False, None, False)),
        ("entropy_coefficient", "0,0.01", Axis("entropy_coefficient", (0, 0.01))),
        ("model.activation", "relu,tanh", Axis("model.activation", ("relu", "tanh"))),
        ("model.hidden_sizes", "[64],[64, 64]", Axis("model.hidden_sizes", ([64], [64, 64]))),
        ("model.recurrent_size", "8..64", Axis("model.recurrent_size", low=8, high=64, whole=True)),
        ("env_kwargs.size", "3..8", Axis("env_kwargs.size", (), 3, 8, False, None, True)),
        ("env_kwargs.wind", "3.0..8", Axis("env_kwargs.wind", (), 3, 8, False, None, False)),
        ("lr", "[[0,1e-3],[9e5,1e-4]],5e-4", Axis("lr", ([[0, 1e-3], [9e5, 1e-4]], 5e-4))),
    ],
)
def test_what_is_written_is_what_is_meant(key: str, text: str, meant: object) -> None:
    assert parse_space({key: text}, {}) == [meant]


def test_values_are_placed_in_tables_and_what_they_came_from_stays() -> None:
    run: dict[str, Any] = {"lr": 1.0, "model": {"hidden_sizes": [8], "activation": "relu"}}
    values = {"lr": 2.0, "model.hidden_sizes": [64], "env_kwargs.size": 3}
    assert placed(run, values) == {
        "lr": 2.0,
        "model": {"hidden_sizes": [64], "activation": "relu"},
        "env_kwargs": {"size": 3},
    }
    assert run == {"lr": 1.0, "model": {"hidden_sizes": [8], "activation": "relu"}}


def test_a_configuration_of_one_algorithm_is_not_swept_over_several() -> None:
    impala = {"algorithm": "impala", "rho_bar": 1.0}
    with pytest.raises(ConfigError, match="CartPole"):
        parse_space({"algorithm": "ppo,appo"}, impala)
    with pytest.raises(ConfigError, match="did you mean 'appo'"):
        parse_space({"algorithm": "ppo,appoo"}, impala)


VECTOR = spaces.Box(-10, 10, (4,), np.float32)
RND = {"intrinsic": {"kind": "rnd"}}


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        *((algorithm, {}) for algorithm in ALGORITHMS),
        ("appo", {"target_kl": 0.01}),
        ("impala", {"replay_share": 0.5, **RND}),
        ("ppo", {"target_kl": 0.01, **RND}),
        ("dqn", {"n_step": 1, "optimizers": {"layers": {"parameters": ["*weight"]}}, **RND}),
    ],
)
def test_a_learner_has_the_metrics_that_its_configuration_names(
    algorithm: str, keys: dict[str, Any]
) -> None:
    model = {"recurrent": "gru"} if needs_memory(algorithm) else {}
    few = {"replay_begin": 8, "replay_capacity": 4096, "replay_ratio": 2.0}
    kept = few if keeps_steps(algorithm) else {}
    acts = action_space_of(algorithm)
    learner = build_learner({"algorithm": algorithm, **kept, **keys}, None, VECTOR, acts, model)
    module = build_module(ALGORITHMS[algorithm].module, VECTOR, acts, model)
    found: set[str] = set()
    for seed in range(6):
        sample = sample_for(module, 4, 32, seed)
        found |= learner.step(sample).keys()
    named = ALGORITHMS[algorithm].config(algorithm=algorithm, **kept, **keys).metric_names()
    assert sorted(named) == sorted(found)


def test_the_metrics_of_ones_own_algorithm_and_of_its_optimizers_are_let_through() -> None:
    own = RunConfig.from_flat({"algorithm": "support.own_algorithms:Learning"})
    must_be_a_metric("modules/default/anything", own)
    optimizers = {"value": {"parameters": ["value*"], "lr": 1e-3}}
    must_be_a_metric("modules/default/lr_value", RunConfig.from_flat({"optimizers": optimizers}))


@pytest.mark.parametrize("key", ["run_dir", "stop_steps"])
def test_what_a_sweep_gives_each_trial_cannot_vary(key: str) -> None:
    with pytest.raises(ConfigError, match=f"--space {key}: .*; leave it out"):
        juggler.sweep("cartpole", space={key: ["a", "b"]}, stop_steps=100)


def test_what_evaluations_have_needs_evaluations() -> None:
    name, keys = "by_agent/agent_0/evaluation_return_mean", {"env": "pettingzoo:x"}
    for metric in (name, "evaluation_return_mean"):
        with pytest.raises(ConfigError, match="evaluation_seconds"):
            must_be_a_metric(metric, RunConfig.from_flat(keys))
        must_be_a_metric(metric, RunConfig.from_flat({**keys, "evaluation_seconds": 2.0}))


PREY = {"train": False, "from": "somewhere"}
SEVERAL = {
    "agents": {"adversary_*": "hunters", "agent_0": "prey", "*": "random"},
    "modules": {"prey": PREY},
}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("by_module/huntr/updates", "module 'huntr': did you mean"),
        ("by_module/x/episodes", "there is no module 'x'; the run has"),
        ("modules/huntr/entropy", "there is no trained module 'huntr': did you mean"),
        ("modules/prey/entropy", "there is no trained module 'prey'"),
        ("modules/hunters/entrpy", "impala has no metric 'entrpy'"),
    ],
)
def test_a_module_that_the_table_agents_does_not_name_is_told(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        must_be_a_metric(name, RunConfig.from_flat(SEVERAL))
    assert str(error.value).startswith(f"metric = {name!r}: ")
    assert told in str(error.value)


@pytest.mark.parametrize(
    "name", ["by_module/hunters/updates", "by_module/prey/episodes", "by_module/random/episodes"]
)
def test_the_modules_of_the_table_agents_have_metrics_of_their_own(name: str) -> None:
    must_be_a_metric(name, RunConfig.from_flat(SEVERAL))
    with pytest.raises(ConfigError, match="'hunters'"):
        must_be_a_metric(name, RunConfig.from_flat({"agents": {"*": "hunters"}}))


@pytest.mark.parametrize(
    "keys",
    [
        {"env": "juggler:MatrixGame", "league": {"builder": "alphastar"}},
        {"league": {"builder": "alphastar"}, "agents": {"row": ["main-0"], "column": ["main-0"]}},
        {"env": "pettingzoo:mpe/simple_tag_v3"},
        {"env": "my_games:tag"},
    ],
)
def test_modules_that_only_the_run_settles_are_let_through(keys: dict[str, Any]) -> None:
    for name in ("by_module/adversary/updates", "modules/adversary/entropy"):
        must_be_a_metric(name, RunConfig.from_flat(keys))
