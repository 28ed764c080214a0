"""A run whose directory is deleted or moved while it trains makes it again, unless it is taken."""

from __future__ import annotations

import json
import shutil
import tomllib
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from juggler.driver.record.journal import LineWriter
from juggler.driver.record.progress import PlainProgress
from juggler.driver.record.run_directory import RunDirectory, RunDirectoryError

CONFIG = {"env": "CartPole-v1", "lr": 1e-3}


def _line(steps: int) -> dict[str, Any]:
    return {"wall_time": steps / 1000, "env_steps_sampled": steps}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", ["deleted", "moved", "only the file"])
def test_a_directory_that_is_gone_is_made_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run"
    with closing(RunDirectory.create(path, CONFIG, "cartpole")) as run:
        run.append(_line(1000))
        assert not run.renew()
        if how == "deleted":
            shutil.rmtree(path)
        elif how == "moved":
            path.rename(tmp_path / "moved")
        else:
            (path / "metrics.jsonl").unlink()
        assert run.renew()
        run.append(_line(2000))
        assert not run.renew()
        with pytest.raises(RunDirectoryError, match="another process"):
            RunDirectory.open(path, CONFIG)
    assert _lines(path) == [_line(2000)]
    assert tomllib.loads((path / "config.toml").read_text())["lr"] == 1e-3
    assert run.checkpoints.is_dir()
    RunDirectory.open(path, CONFIG).close()


def test_a_directory_that_cannot_be_made_again_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    with closing(RunDirectory.create(path, CONFIG, "cartpole")) as run:
        shutil.rmtree(path.parent)
        path.parent.touch()
        with pytest.raises(RunDirectoryError, match=r"cannot be made again|cannot read"):
            run.renew()
        path.parent.unlink()
        assert run.renew()


def test_a_directory_that_another_run_has_taken_stays_as_that_run_has_it(tmp_path: Path) -> None:
    path, shown = tmp_path / "run", StringIO()
    with closing(RunDirectory.create(path, CONFIG, "first")) as run:
        lines = LineWriter(run, PlainProgress(shown))
        lines.append(_line(1000))
        shutil.rmtree(path)
        with closing(RunDirectory.create(path, {"lr": 2.0}, "second")) as other:
            other.append(_line(7))
            renewed = [lines.append(_line(steps)) for steps in (2000, 3000)]
            assert renewed == [False, False]
            assert _lines(path) == [_line(7)]
            assert tomllib.loads((path / "config.toml").read_text()) == {"lr": 2.0}
            told = (
                f"error: the run directory {path} was deleted or moved, and another run has taken "
                "it: metrics and checkpoints of this run are lost\n"
            )
            assert shown.getvalue() == told, "once"
            with pytest.raises(RunDirectoryError, match="summary"):
                run.write_summary({})
        assert not lines.append(_line(3500)), "nor does it take what that run has left"
        assert lines.taken
        assert not (path / "summary.json").exists()
        shutil.rmtree(path)
        assert lines.append(_line(4000)), "the run goes on, and has its directory again"
    assert _lines(path) == [_line(4000)]
    assert tomllib.loads((path / "config.toml").read_text()) == CONFIG
