"""What a script or a notebook shows of how a run ended."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import juggler
from juggler.driver.record.progress import NotebookProgress, PlainProgress, make_progress

SUMMARY: dict[str, Any] = {
    "solved": True,
    "episode_return_mean": 480.25,
    "env_steps_trained": 312_000,
    "updates": 1300,
    "wall_time": 9.4,
    "reason_for_stop": "solved",
}
LINE: dict[str, Any] = {
    **SUMMARY,
    "steps_per_second": 1000.0,
    "staleness_mean": 0.5,
    "num_env_runners": 2,
}


def test_a_result_prints_as_five_lines() -> None:
    result = juggler.Result(SUMMARY, Path("runs/<one>"), Path("runs/<one>/checkpoints/000001300"))
    assert str(result).splitlines() == [
        "outcome    solved after 9.4 s",
        "return     480.2, the mean of the last episodes",
        "steps      312k trained on, in 1,300 updates",
        "run        runs/<one>",
        "checkpoint runs/<one>/checkpoints/000001300",
    ]
    shown = result._repr_html_()
    assert shown.count("<tr>") == 5
    assert "runs/&lt;one&gt;" in shown


def test_directories_are_shown_from_where_the_reader_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    result = juggler.Result(SUMMARY, run, run / "checkpoints" / "000001300")
    monkeypatch.chdir(tmp_path)
    assert "run        runs/one\n" in str(result)
    monkeypatch.chdir(run)
    assert str(result).endswith("checkpoint checkpoints/000001300")
    monkeypatch.chdir("/usr")
    assert f"run        {run}\n" in str(result)


def test_a_run_without_a_checkpoint_has_five_lines_too() -> None:
    summary = {**SUMMARY, "solved": False, "reason_for_stop": "interrupted"}
    lines = str(juggler.Result(summary, Path("run"), None)).splitlines()
    assert lines[0] == "outcome    ended (interrupted) after 9.4 s"
    assert lines[4] == "checkpoint none"


class _Notebook:
    """What IPython has in a kernel, as far as a display uses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
        self.shown: list[str] = []
        ipython = types.ModuleType("IPython")
        display = types.ModuleType("IPython.display")
        ipython.get_ipython = lambda: types.SimpleNamespace(kernel=kernel)  # type: ignore[attr-defined]
        display.display = self._display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def _display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> _Notebook:
        assert raw
        assert display_id
        self.shown.append(data["text/plain"])
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown[-1] = data["text/plain"]


def test_a_notebook_has_one_line_that_is_written_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = _Notebook(monkeypatch, kernel=object())
    progress = make_progress("auto")
    assert isinstance(progress, NotebookProgress)
    progress.waiting("the forkserver imports torch", 0.5)
    assert notebook.shown == ["0.5 s  starting: the forkserver imports torch"]
    progress.stop_waiting()
    progress.start({"env": "CartPole-v1", "algorithm": "impala", "stop_steps": 313_000})
    progress.update(LINE)
    progress.message("something happened", "warning")
    (line,) = notebook.shown
    assert line.startswith("CartPole-v1 with impala until 313k steps\n9.4 s  return   480.2")
    assert line.endswith("1.0 s left")
    progress.finish({**SUMMARY, "run_dir": "runs/one"})
    (line,) = notebook.shown
    assert line.endswith("\nsolved: return 480.2 after 312k steps in 9.4 s")
    assert capsys.readouterr().out == "warning: something happened\n"


def test_a_shell_without_a_kernel_has_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _Notebook(monkeypatch, kernel=None)
    assert type(make_progress("auto")) is PlainProgress
