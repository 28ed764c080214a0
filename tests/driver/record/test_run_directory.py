from __future__ import annotations

import errno
import json
import os
import re
import resource
import tomllib
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from juggler.driver.config import RunConfig
from juggler.driver.given_config import load_config
from juggler.driver.record.event_file import tag_of
from juggler.driver.record.journal import LineWriter
from juggler.driver.record.progress import PlainProgress
from juggler.driver.record.run_directory import (
    RunDirectory,
    RunDirectoryError,
    to_json,
)

CONFIG = {
    "env": "CartPole-v1",
    "lr": 1e-3,
    "stop_steps": None,
    "hidden": [64, 64],
    "env_kwargs": {"size": None},
}


def _line(steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "wall_time": steps / 1000,
        "env_steps_sampled": steps,
        "env_steps_dropped": {"stale": 3},
        "weights_version": [1, 2],
        "episode_return_mean": None,
        "seconds": {"learner": {"update": 0.5}},
        "modules": {"default": {"policy_loss": -0.25}},
        **changes,
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def _events(path: Path) -> EventAccumulator:
    return EventAccumulator(str(path)).Reload()


def test_a_new_run_directory_holds_the_configuration(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path / "a" / "run", CONFIG, "cartpole")) as run:
        assert run.path == tmp_path / "a" / "run"
        assert run.checkpoints == run.path / "checkpoints"
        assert run.checkpoints.is_dir()
    found = tomllib.loads((run.path / "config.toml").read_text())
    none = {key: "none" for key, value in CONFIG.items() if value is None}
    assert none
    assert found == {
        "env": "CartPole-v1",
        "lr": 1e-3,
        "hidden": [64, 64],
        "env_kwargs": {},
        **none,
    }


def test_a_configuration_that_toml_cannot_hold_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="TOML"):
        RunDirectory.create(tmp_path / "run", {"env_kwargs": {"sizes": [None]}}, "cartpole")
    assert list(tmp_path.iterdir()) == []


def test_the_default_directory_is_named_after_the_run_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = []
    for _ in range(3):
        with closing(RunDirectory.create(None, CONFIG, "ALE/Pong-v5: first")) as run:
            paths.append(run.path)
    assert len(set(paths)) == 3
    for path in paths:
        assert path.parent == tmp_path / "runs", "absolute: a script may go elsewhere meanwhile"
        assert re.fullmatch(r"ALE-Pong-v5-first-\d{8}-\d{6}(-\d)?", path.name)


def test_a_name_of_nothing_but_dots_stays_within_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(RunDirectory.create(None, CONFIG, "../..")) as run:
        assert run.path.resolve().parent == tmp_path / "runs"


def test_an_empty_directory_is_taken_and_a_full_one_is_not(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")):
        with pytest.raises(RunDirectoryError) as while_it_goes_on:
            RunDirectory.create(tmp_path, CONFIG, "cartpole")
        told = str(while_it_goes_on.value)
        assert "may still be writing" in told
        assert "delete" not in told
    before = sorted(tmp_path.iterdir())
    nothing = "not empty, and has no checkpoint to go on from; name another, or delete this one"
    with pytest.raises(RunDirectoryError, match=nothing):
        RunDirectory.create(tmp_path, CONFIG, "cartpole")
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.create(tmp_path / "file", CONFIG, "cartpole")
    with pytest.raises(RunDirectoryError, match="cannot make"):
        RunDirectory.create(tmp_path / "file" / "run", CONFIG, "cartpole")


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.append(_line(1000))
        assert _lines(tmp_path) == [_line(1000)]
        run.append(_line(2000))
        assert _lines(tmp_path) == [_line(1000), _line(2000)]


def test_lines_are_valid_json_whatever_the_numbers(tmp_path: Path) -> None:
    values = [np.float32("nan"), np.float64(0.5), float("-inf"), np.int64(3), np.array([1, np.nan])]
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.append(_line(np.int64(7), values=values))  # type: ignore[arg-type]
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(text, parse_constant=refuse)
    assert found["values"] == [None, 0.5, None, 3, [1.0, None]]
    assert found["env_steps_sampled"] == 7


def test_keys_that_are_numbers_become_strings() -> None:
    assert to_json({1: (2, {3: None})}) == {"1": [2, {"3": None}]}


def test_a_run_that_goes_on_appends_after_the_last_whole_line(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.append(_line(1000))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"wall_time": 3.0, "env_st')
    with closing(RunDirectory.open(tmp_path, CONFIG)) as run:
        run.append(_line(1500))
    assert _lines(tmp_path) == [_line(1000), _line(1500)]


def test_a_run_killed_in_its_first_line_goes_on(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, CONFIG, "cartpole").close()
    (tmp_path / "metrics.jsonl").write_text('{"wall')
    with closing(RunDirectory.open(tmp_path, CONFIG)) as run:
        run.append(_line(10))
    assert _lines(tmp_path) == [_line(10)]


@pytest.mark.parametrize(("name", "reason"), [("nowhere", "not a directory"), ("", "config.toml")])
def test_only_a_run_directory_can_be_opened(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(RunDirectoryError, match=reason):
        RunDirectory.open(tmp_path / name, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_cannot_write_in_one_run_directory(tmp_path: Path) -> None:
    with (
        closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")),
        pytest.raises(RunDirectoryError, match="another process"),
    ):
        RunDirectory.open(tmp_path, CONFIG)
    RunDirectory.open(tmp_path, CONFIG).close()


def test_a_disk_that_takes_no_more_leaves_whole_lines(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.append(_line(1000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            with pytest.raises(RunDirectoryError, match=os.strerror(errno.EFBIG)):
                run.append(_line(2000, padding="x" * 2000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert _lines(tmp_path) == [_line(1000)]
        run.append(_line(3000))
    assert _lines(tmp_path) == [_line(1000), _line(3000)]


def test_what_is_wrong_with_the_disk_is_told_once_and_so_is_its_end(tmp_path: Path) -> None:
    shown = StringIO()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        lines = LineWriter(run, PlainProgress(shown))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            for _ in range(3):
                lines.append(_line(2000, padding="x" * 2000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        for steps in (3000, 4000):
            lines.append(_line(steps))
    first, second = shown.getvalue().splitlines()
    assert first.startswith(f"error: cannot write metrics in {tmp_path}")
    assert second == f"metrics are written in {tmp_path} again"
    assert _lines(tmp_path) == [_line(3000), _line(4000)]


def test_a_summary_replaces_the_one_before_it_and_leaves_nothing_beside(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.write_summary({"solved": False})
        run.write_summary({"solved": True, "loss": float("nan")})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"solved": True, "loss": None}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.toml", "metrics.jsonl", "summary.json", "checkpoints"}


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.append(_line(1000))
        run.append(_line(2000, episode_return_mean=42.5))
    events = _events(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("rollout/episode_return_mean")] == [
        (2000, 42.5)
    ]
    losses = [(e.step, e.value) for e in events.Scalars("train/default/policy_loss")]
    assert losses == [(1000, -0.25), (2000, -0.25)]
    assert {"time/env_steps_dropped/stale", "time/seconds/learner/update"} <= set(
        events.Tags()["scalars"]
    )


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("episode_return_mean", "rollout/episode_return_mean"),
        ("evaluation_return_mean", "rollout/evaluation_return_mean"),
        ("modules/hunter/policy_loss", "train/hunter/policy_loss"),
        ("staleness_mean", "train/staleness_mean"),
        ("steps_per_second", "time/steps_per_second"),
        ("env_steps_trained", "time/env_steps_trained"),
        ("info/score/mean", "info/score/mean"),
        ("custom/half", "custom/half"),
        ("by_module/hunter/episode_return_mean", "by_module/hunter/episode_return_mean"),
    ],
)
def test_tags_of_tensorboard_are_in_groups(key: str, tag: str) -> None:
    assert tag_of(key) == tag


def test_without_tensorboard_among_the_trackers_there_are_no_events(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path, {**CONFIG, "track": []}, "cartpole")) as run:
        run.append(_line(1000))
    assert not list(tmp_path.glob("events.out.*"))
    assert _lines(tmp_path) == [_line(1000)]


def test_tensorboard_forgets_what_a_restored_run_does_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        for steps in (1000, 2000, 3000):
            run.append(_line(steps, wall_time=1.0))
    monkeypatch.setattr("time.time", lambda: 4e9)  # another file name, and later in order
    with closing(RunDirectory.open(tmp_path, CONFIG)) as run:
        run.append(_line(2000, wall_time=2.0))
    found = [(e.step, e.value) for e in _events(tmp_path).Scalars("time/wall_time")]
    assert found == [(1000, 1.0), (2000, 2.0)]


def test_trackers_that_replace_the_events_writer_learn_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = []

    class Following(event_file_writer.EventFileWriter):
        def __init__(self, logdir: str, *options: Any) -> None:
            followed.append(logdir)
            super().__init__(logdir, *options)

    monkeypatch.setattr(event_file_writer, "EventFileWriter", Following)
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.append(_line(1000))
        run.append(_line(2000))
    assert followed == [str(tmp_path)]
    assert [e.step for e in _events(tmp_path).Scalars("time/wall_time")] == [1000, 2000]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_that_the_disk_does_not_take_are_told_and_begun_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(RunDirectory.create(tmp_path, CONFIG, "cartpole")) as run:
        run.append(_line(1000))
        (events,) = tmp_path.glob("events.out.tfevents.*")
        assert events.stat().st_size > (tmp_path / "metrics.jsonl").stat().st_size + 40
        resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size + 10, limits[1]))
        try:
            with pytest.raises(RunDirectoryError, match="cannot write events"):
                run.append({"env_steps_sampled": 2000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        run.append(_line(3000))
    assert len([*tmp_path.glob("events.out.tfevents.*")]) == 2
    assert [e.step for e in _events(tmp_path).Scalars("time/wall_time")] == [1000, 3000]
    assert capfd.readouterr().err == ""


def test_a_config_survives_its_file_none_included(tmp_path: Path) -> None:
    config = RunConfig.from_flat({"grad_clip": "none", "env_kwargs": {"a": 1}, "stop_steps": 7})
    assert config.learner.grad_clip is None
    with closing(RunDirectory.create(tmp_path / "run", config.flat(), "x")):
        pass
    assert load_config(tmp_path / "run" / "config.toml") == config


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG, "x").discard()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_goes_on_has_the_config_that_it_goes_on_with(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", {"lr": 1.0}, "x").close()
    RunDirectory.open(tmp_path / "run", {"lr": 2.0}).close()
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text()) == {"lr": 2.0}
