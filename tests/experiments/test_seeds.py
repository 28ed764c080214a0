"""Runs with several seeds; but for the last test, they are scripted."""

from __future__ import annotations

import json
import signal
import tomllib
from pathlib import Path

import numpy as np
import pytest
from support.place import status_of

import juggler
from juggler.cli.arguments import PlotError
from juggler.cli.plot import plot as draw
from juggler.cli.plot import save as plot
from juggler.driver.driver import RunFailed

RUNS = ["--stop-steps", 1000, "--progress", "plain", "--num-env-runners", 1]
QUICK = ["--value-coefficient", 0.0, "--lr", 2.0]


@pytest.fixture
def seeds(
    tmp_path: Path, scripted_runs: None, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, str]:
    """Five seeds from 3 on -> their directory, and what was said."""
    directory = tmp_path / "seeds"
    given = ["--seeds", 5, "--seed", 3, "--jobs", 2, "--run-dir", directory]
    assert status_of("train", "cartpole", *RUNS, *QUICK, *given) == 0
    return directory, capsys.readouterr().out


def test_each_seed_has_a_run_and_they_are_reported_together(seeds: tuple[Path, str]) -> None:
    directory, said = seeds
    runs = sorted(path.name for path in directory.glob("seed-?"))
    assert runs == ["seed-3", "seed-4", "seed-5", "seed-6", "seed-7"]
    for run in runs:
        config = tomllib.loads((directory / run / "config.toml").read_text())
        assert (config["seed"], config["lr"]) == (int(run[-1]), 2.0)
    assert "0 of 5 seeds have ended" in said, "before any has ended"
    assert "final return  20.00  (95 % interval 20.00 to 20.00; interquartile mean of 5" in said
    result = json.loads((directory / "seeds.json").read_text())
    assert [run["seed"] for run in result["runs"]] == [3, 4, 5, 6, 7]
    assert result["best_return"] == {"mean": 20.0, "low": 20.0, "high": 20.0}
    assert (directory / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_of_seeds_is_drawn_as_a_mean_with_its_interval(
    seeds: tuple[Path, str], tmp_path: Path
) -> None:
    directory, _ = seeds
    alone = directory / "seed-3"
    figure = draw(directory, alone).figure
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["seeds", "seed-3"]
    over_steps = figure.get_axes()[0]
    mean = next(line for line in over_steps.get_lines() if line.get_linewidth() == 2)
    x, y = np.asarray(mean.get_xdata()), np.asarray(mean.get_ydata())
    np.testing.assert_allclose(y, 2.0 * x / 100, err_msg="the script's line")
    assert len(over_steps.collections) == 1, "a band"
    assert len(over_steps.get_lines()) == 5 + 1 + 1

    runs = [directory / f"seed-{seed}" for seed in range(3, 8)]
    for count, bands in ((5, 1), (4, 0)):
        together = draw(*runs[:count], together=True).figure
        assert len(together.get_axes()[0].collections) == bands
    assert plot([directory], tmp_path / "a.png").exists()
    with pytest.raises(PlotError, match="leave out --by module"):
        draw(directory, by="module")


@pytest.mark.usefixtures("scripted_runs")
@pytest.mark.parametrize(
    ("seeds", "of"), [(1, "1 seed"), (2, "interquartile mean of 2 seeds; an interval needs 5")]
)
def test_few_seeds_have_returns_and_no_interval(
    seeds: int, of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "seeds"
    given = ["--seeds", seeds, "--run-dir", directory]
    assert status_of("train", "cartpole", *RUNS, *QUICK, *given) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"final return  20.00  ({of})" in said
    assert f"best return   20.00  ({of})" in said
    result = json.loads((directory / "seeds.json").read_text())
    assert result["final_return"] == {"mean": 20.0, "low": None, "high": None}
    assert len(draw(directory).figure.get_axes()[0].collections) == 0, "no band"


@pytest.mark.usefixtures("scripted_runs")
def test_runs_that_fail_are_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "seeds"
    given = ["--seeds", 2, "--run-dir", directory, "--gamma", 0.5]
    assert status_of("train", "cartpole", *RUNS, *QUICK, *given) == 1
    said = capsys.readouterr()
    assert "seed   0  failed: ended by SIGKILL" in said.out
    assert "no run succeeded; their output is in" in said.err
    again = {"run_dir": str(tmp_path / "again"), "stop_steps": 1000, "gamma": 0.5}
    with pytest.raises(RunFailed):
        juggler.train_seeds("cartpole", seeds=1, **again)


@pytest.mark.usefixtures("scripted_runs")
def test_ctrl_c_ends_the_runs_in_order_and_they_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "seeds"
    metrics = directory / "seed-0" / "metrics.jsonl"
    given = ["--seeds", 2, "--jobs", 1, "--run-dir", directory, "--reward-scale", 2.0]
    before = signal.getsignal(signal.SIGINT)
    try:
        assert status_of("train", "cartpole", *RUNS, *QUICK, *given) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().out
    assert f"to resume: juggler train --resume {directory} --seeds 2" in said
    for file in (directory / "seeds.toml", directory / "seed-0" / "config.toml"):
        file.write_text(file.read_text().replace("reward_scale = 2.0", "reward_scale = 1.0"))
    assert status_of("train", "--resume", directory) == 2, "it says that --seeds is missing"
    assert status_of("train", "--resume", directory, "--seeds", 2) == 0
    assert len(metrics.read_text().splitlines()) == 10, "it continued, and did not restart"
    assert "interquartile mean of 2 seeds" in capsys.readouterr().out


@pytest.mark.slow
def test_real_runs_have_a_seed_each_and_are_reported_together(tmp_path: Path) -> None:
    found = juggler.train_seeds(
        "cartpole", seeds=2, jobs=2, run_dir=str(tmp_path / "s"), stop_steps=8000, progress="off"
    )
    first, second = found.runs
    for seed, run in enumerate(found.runs):  # mean returns of few episodes may be equal by chance
        assert f"seed = {seed}\n" in (Path(run["run_dir"]) / "config.toml").read_text()
        summary = json.loads((Path(run["run_dir"]) / "summary.json").read_text())
        assert run["final_return"] == summary["episode_return_mean"] <= run["best_return"]
    assert found.final_return.mean == pytest.approx(
        (first["final_return"] + second["final_return"]) / 2
    )
