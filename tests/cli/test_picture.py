from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import juggler
from juggler.cli.arguments import PlotError
from juggler.cli.plot import RunCurves, _figure, read_run, smoothed
from juggler.cli.plot import save as plot
from juggler.driver.reporting.run_directory import RunDirectoryError


def _line(steps: int, wall_time: float, **changes: Any) -> dict[str, Any]:
    return {
        "env_steps_sampled": steps,
        "wall_time": wall_time,
        "steps_per_second": 1000.0,
        "episode_return_mean": None if steps == 0 else steps / 10,
        "evaluation_return_mean": None,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        **changes,
    }


def _write(path: Path, lines: list[Any]) -> Path:
    path.mkdir(parents=True)
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    (path / "metrics.jsonl").write_text(text)
    return path


def _run(path: Path, lines: list[Any]) -> RunCurves:
    return read_run(_write(path, lines), path.name)


def test_a_run_is_drawn_into_its_directory(tmp_path: Path) -> None:
    run = _write(tmp_path / "run", [_line(1000 * i, float(i)) for i in range(10)])
    assert plot([run]) == run / "plot.png"
    assert juggler.plot(run)._repr_png_().startswith(b"\x89PNG"), "a notebook shows it"
    content = (run / "plot.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert width > height > 700


def test_a_picture_of_several_runs_goes_where_it_is_told_or_into_the_working_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [_write(tmp_path / name, [_line(1000, 1.0), _line(2000, 2.0)]) for name in "ab"]
    assert plot(runs, tmp_path / "both") == tmp_path / "both.png"
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert plot(runs) == Path("comparison.png")
    assert Path("comparison.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "a" / "plot.png").exists()
    assert capsys.readouterr().err == ""


def test_every_panel_shows_every_run_over_steps_and_over_time(tmp_path: Path) -> None:
    slow = _run(tmp_path / "slow", [_line(100 * i, float(i)) for i in range(200)])
    fast = _run(
        tmp_path / "fast", [_line(900 * i, float(i), steps_per_second=9e3) for i in range(90)]
    )
    figure = _figure([slow, fast])
    panels = figure.get_axes()
    labels = ["environment steps"] * 3 + ["training time (min)"] * 3
    assert [axes.get_xlabel() for axes in panels] == labels
    assert [axes.get_ylabel() for axes in panels[:3]] == [
        "mean return per episode",
        "throughput (steps/s)",
        "staleness (updates)",
    ]
    for axes, run in ((axes, run) for axes in panels for run in (slow, fast)):
        scale = 60 if axes.get_xlabel() == labels[-1] else 1
        key = "training_time" if scale == 60 else "env_steps_sampled"
        drawn = [np.asarray(line.get_xdata())[-1] for line in axes.get_lines()]
        assert run.column(key)[-1] / scale in drawn
    assert panels[1].get_ylim()[0] == 0
    assert panels[1].get_ylim()[1] > 9000  # the run drawn first does not set the scale
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["slow", "fast"]


def test_an_evaluation_is_one_point_however_many_lines_repeat_it(tmp_path: Path) -> None:
    values = [None, 5.0, 5.0, 7.0, 7.0]
    lines = [_line(i, float(i), evaluation_return_mean=value) for i, value in enumerate(values)]
    figure = _figure([_run(tmp_path / "run", lines)])
    points = figure.get_axes()[0].get_lines()[1]
    assert np.asarray(points.get_xdata()).tolist() == [1.0, 3.0]
    assert np.asarray(points.get_ydata()).tolist() == [5.0, 7.0]


def test_broken_lines_are_left_out_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = json.dumps(_line(3, 3.0)).replace("3.0", "9" * 400)
    lines = [
        _line(1, 1.0),
        '{"wall_time": 1.5, "env_st',
        "[1, 2]",
        "[" * 100_000,
        "",
        huge,
        _line(2, "soon"),  # type: ignore[arg-type]
        {"wall_time": 2.0},
        _line(4, 4.0, episode_return_mean="high"),
    ]
    run = _write(tmp_path / "run", lines)
    found = read_run(run, "run")
    assert len(found.lines) == 2
    assert found.column("env_steps_sampled").tolist() == [1.0, 4.0]
    assert np.isnan(found.column("episode_return_mean")[1])
    plot([run])
    assert "left out 7 lines of" in capsys.readouterr().err


def test_what_a_restored_run_does_again_counts_once(tmp_path: Path) -> None:
    before = [_line(100 * i, float(i)) for i in range(6)]
    again = [_line(100 * i, i - 3.0, staleness_mean=9.0) for i in range(3, 8)]
    column = _run(tmp_path / "run", before + again).column
    assert column("env_steps_sampled").tolist() == [0, 100, 200, 300, 300, 400, 500, 600, 700]
    assert column("training_time").tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert column("staleness_mean").tolist() == [0.5] * 4 + [9.0] * 5


@pytest.mark.parametrize(
    ("lines", "reason"),
    [([], "it is empty"), (["{", "?"], "none of its 2 lines"), ([""], "none of its 1 lines")],
)
def test_a_run_without_metrics_is_an_error(tmp_path: Path, lines: list[str], reason: str) -> None:
    run = _write(tmp_path / "run", lines)
    with pytest.raises(PlotError, match=reason) as raised:
        plot([run])
    assert str(run) in str(raised.value)
    assert not (run / "plot.png").exists()


def test_a_path_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlotError, match=r"has no metrics\.jsonl"):
        plot([tmp_path])
    with pytest.raises(PlotError, match="is not a directory"):
        plot([tmp_path / "nowhere"])
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot read"):
        plot([tmp_path])
    with pytest.raises(PlotError, match="at least one"):
        plot([])


def _by_name(key: str, step: int, **means: float) -> dict[str, Any]:
    return {
        key: {
            name: {"episode_return_mean": mean * step, "evaluation_return_mean": None}
            for name, mean in means.items()
        }
    }


def _of_two(path: Path, **more: Any) -> Path:
    lines = [
        _line(
            100 * i,
            float(i),
            episode_return_mean=0.0,
            **_by_name("by_agent", i, a=1.0, b=-0.5, c=-0.5),
            **{key: make(i) for key, make in more.items()},
        )
        for i in range(5)
    ]
    return _write(path, lines)


def _modules(step: int) -> Any:
    return _by_name("by_module", step, hunter=1.0, prey=-0.5)["by_module"]


def _drawn(figure: Any) -> dict[str, list[float]]:
    """The curves of the first panel by their names in the legend."""
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    lines = [line for line in figure.get_axes()[0].get_lines() if line.get_label() == "training"]
    return {
        name: np.asarray(line.get_ydata()).tolist() for name, line in zip(names, lines, strict=True)
    }


def test_a_run_of_several_modules_has_a_curve_for_each(tmp_path: Path) -> None:
    run = _of_two(tmp_path / "run", by_module=_modules)
    drawn = _drawn(_figure([read_run(run, "run")], "auto"))
    assert drawn == {"hunter": [0, 1, 2, 3, 4], "prey": [0, -0.5, -1, -1.5, -2]}
    by_agent = _drawn(_figure([read_run(run, "run")], "agent"))
    assert list(by_agent) == ["a", "b", "c"]
    figure = _figure([read_run(run, "run")])
    assert not figure.legends
    assert len(figure.get_axes()[1].get_lines()) == 1, "there is one throughput"


def test_several_runs_have_a_curve_for_each_module_where_that_is_asked(tmp_path: Path) -> None:
    runs = [_of_two(tmp_path / name, by_module=_modules) for name in ("one", "two")]
    read = [read_run(path, path.name) for path in runs]
    drawn = _drawn(_figure(read, "module"))
    assert list(drawn) == ["one: hunter", "one: prey", "two: hunter", "two: prey"]
    assert plot(runs, tmp_path / "both.png", by="module").is_file()
    assert list(_drawn(_figure(read))) == ["one", "two"]


def _of_losses(path: Path, *modules: str) -> Path:
    def told(i: int) -> dict[str, dict[str, float]]:
        return {name: {"policy_loss": i * 0.5 + at} for at, name in enumerate(modules)}

    return _write(path, [_line(100 * i, float(i), modules=told(i)) for i in range(6)])


def test_any_metrics_are_drawn_instead_of_the_usual_panels(tmp_path: Path) -> None:
    run = _of_losses(tmp_path / "run", "hunter", "prey")
    metrics = ["policy_loss", "staleness_mean", "modules/prey/policy_loss"]
    figure = juggler.plot(run, metrics=metrics).figure
    panels = figure.get_axes()
    assert [axes.get_ylabel() for axes in panels[:3]] == metrics
    hunter, prey = panels[0].get_lines()
    assert np.asarray(hunter.get_ydata()).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert np.asarray(prey.get_ydata()).tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    (whole,) = panels[2].get_lines()
    assert np.asarray(whole.get_ydata()).tolist() == np.asarray(prey.get_ydata()).tolist()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["hunter", "prey", "run"]


def test_a_metric_of_several_runs_is_a_curve_for_each_or_their_mean(tmp_path: Path) -> None:
    runs = [_of_losses(tmp_path / name, "default") for name in "ab"]
    figure = juggler.plot(*runs, metrics=["policy_loss"]).figure
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    together = juggler.plot(*runs, metrics=["policy_loss"], together=True).figure
    names = [line.get_label() for line in together.get_axes()[0].get_lines()]
    assert names == ["one run", "one run", "interquartile mean"]


def test_smoothed_curves_are_means_of_the_lines_up_to_each(tmp_path: Path) -> None:
    assert smoothed(np.array([1.0, 3.0, np.nan, 5.0, 9.0]), 3)[[0, 1, 3, 4]].tolist() == [
        1,
        2,
        4,
        7,
    ]
    for lines in (1, 5, 6, 100):
        assert smoothed(np.array([4.0, 4.0, np.nan, 4.0, 4.0]), lines)[4] == 4.0
    run = _of_losses(tmp_path / "run", "default")
    axes = juggler.plot(run, metrics=["policy_loss"], smooth=2).figure.get_axes()[0]
    (line,) = axes.get_lines()
    assert np.asarray(line.get_ydata()).tolist() == [0.0, 0.25, 0.75, 1.25, 1.75, 2.25]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"metrics": ["policy_lose"]}, "policy_lose"),
        ({"metrics": ["kl"], "by": "agent"}, "--by agent"),
        ({"smooth": 0}, "at least 1"),
    ],
)
def test_a_metric_that_cannot_be_drawn_is_an_error(
    tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlotError, match=words):
        juggler.plot(_of_losses(tmp_path / "run", "default"), **wrong)
