"""How a run ends, in the background too, and what it shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from support.workers_world import (
    SHAPE,
    WorkersWorld,
    answer_the_snapshot,
    play_a_round,
    synchronous,
)

import juggler
from juggler.driver import periodic_work, signals, start_run
from juggler.driver import run_end as run_clock
from juggler.driver.callbacks import ChangedValues
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.driver import Shutdown
from juggler.driver.periodic_work import Intervals
from juggler.driver.reporting.progress import NotebookProgress, make_progress
from juggler.driver.reporting.wording import Progress, conclude
from juggler.driver.run_end import RunClock, goal_reached, goals_behind
from juggler.driver.signals import signals_become
from juggler.driver.start_run import StartedRun
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.wire.v1 import training_pb2


def wind_down(world: WorkersWorld, reason: str, drain: Callable[[], None] = lambda: None) -> None:
    """End a run whose workers say in the meantime what `drain` gives."""
    supervisor = SimpleNamespace(stop_restarting=lambda: None, of_use=lambda _: None)
    local = SimpleNamespace(supervisor=supervisor, keep_failing=lambda _: False)
    world.parts.local = cast(Any, local)
    loop = SimpleNamespace(drain=lambda seconds, done: drain())
    periodic = SimpleNamespace(
        standstill=SimpleNamespace(hung_runners=lambda _: ""), write_line=lambda: {}
    )
    ending = Shutdown(
        world.parts,
        cast(Any, loop),
        cast(Any, periodic),
        cast(Any, SimpleNamespace(path=world.parts.run_dir)),
    )
    world.parts.end.stop(reason)
    ending.wind_down()


def told_at_the_end(directory: Path, reason: str) -> list[str]:
    """Messages of a run whose learner is alive but saves nothing."""
    world = WorkersWorld(directory)
    world.ask_for_a_snapshot()
    world.resident["learner-0"] = 1
    wind_down(world, reason)
    return [text for text in world.told.messages if "waiting for the last checkpoint" in text]


@pytest.mark.parametrize("hopeless", ["", "module 'default': not finite"])
@pytest.mark.parametrize("reason", ["stop_steps", "interrupted", "solved"])
def test_the_last_updates_metrics_are_read_and_fail_a_run_that_cannot_improve(
    tmp_path: Path, reason: str, hopeless: str
) -> None:
    world = WorkersWorld(tmp_path)
    world.meet()
    world.sample()
    ((of_update, update),) = world.asked(world.learner, training_pb2.Update)
    version = {"generation": update.generation, "update": 1}
    made = training_pb2.UpdateDone(update_id=update.update_id, version=version)
    world.reply(world.learner, of_update, made)
    answered = [of_update]

    def answer() -> None:
        for command_id, asked in world.asked(world.learner, training_pb2.Update):
            if command_id not in answered:
                assert asked.metrics_only
                answered.append(command_id)
                done = training_pb2.UpdateDone(version=version, hopeless=hopeless)
                done.metrics["default"].values["skipped"] = 1.0
                world.reply(world.learner, command_id, done)

    wind_down(world, reason, answer)
    assert len(answered) == 2
    assert world.parts.core.updates == 1
    assert world.parts.metrics.modules["learner-0", "default"]["default"] == {"skipped": 1.0}
    failed = "learner-0 cannot improve module 'default'" in world.parts.end.failure
    assert failed == bool(hopeless and reason != "solved")
    assert world.parts.end.reason == reason


def test_the_last_checkpoint_of_a_synchronous_run_waits_for_no_turn(tmp_path: Path) -> None:
    """A turn cut short by the end is played again, and uncounted."""
    world = synchronous(tmp_path / "checkpoints")
    world.meet()
    play_a_round(world)
    assert world.parts.commands.pool.has_in_flight(training_pb2.SampleRequest)
    answered = [command_id for command_id, _ in world.asked(world.learner, training_pb2.Update)]
    snapshots: list[int] = []

    def answer() -> None:
        for command_id, asked in world.asked(world.learner, training_pb2.Update):
            if command_id not in answered:
                answered.append(command_id)
                version = {"generation": 1, "update": 1}
                world.reply(world.learner, command_id, training_pb2.UpdateDone(version=version))
                assert asked.metrics_only
        for command_id, _ in world.asked(world.learner, training_pb2.Snapshot):
            if command_id not in snapshots:
                snapshots.append(command_id)
                answer_the_snapshot(world)

    episodes = world.parts.metrics.episodes
    wind_down(world, "interrupted", answer)
    assert len(snapshots) == 1
    assert world.parts.checkpoints.writing, "all of the learner's state has come"
    assert world.parts.metrics.episodes == episodes


@pytest.mark.parametrize(
    ("reason", "way_out"),
    [
        ("interrupted", "a second Ctrl-C leaves without it"),
        ("terminated", "a second Ctrl-C leaves without it"),
        ("stop_steps", "Ctrl-C twice leaves without it"),
        ("solved", "Ctrl-C twice leaves without it"),
    ],
)
def test_people_are_told_once_how_to_leave_without_the_last_checkpoint(
    tmp_path: Path, reason: str, way_out: str
) -> None:
    assert told_at_the_end(tmp_path, reason) == [f"waiting for the last checkpoint; {way_out}"]


def test_a_run_in_a_thread_says_nothing_of_ctrl_c_which_is_the_programs(tmp_path: Path) -> None:
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.extend(told_at_the_end(tmp_path, "solved")))
    thread.start()
    thread.join()
    assert told == ["waiting for the last checkpoint"]


@pytest.mark.parametrize(
    ("env", "how"),
    [("CartPole-v1", "juggler train --resume "), ("__main__:Maze", "juggler.resume(")],
)
def test_a_run_that_needs_a_script_is_not_said_to_go_on_by_a_command(
    tmp_path: Path, env: str, how: str
) -> None:
    world = WorkersWorld(tmp_path)
    world.parts.only_local = True
    world.parts.config = RunConfig.from_flat({**SHAPE, "env": env})
    world.parts.core = cast(Any, SimpleNamespace(has_updated=True))
    directory = SimpleNamespace(path=tmp_path, newest_checkpoint=lambda: None)
    nothing = cast(Any, None)
    ending = Shutdown(world.parts, nothing, nothing, cast(Any, directory))
    ending._newest_update = lambda: 7  # type: ignore[method-assign]
    assert ending.how_to_resume().startswith(f"\nTo resume from update 7: {how}")


# What a driver does that is started again by the same command.


CONFIG = RunConfig.from_flat({"stop_return": 475.0, "stop_steps": 1000})


def _ended(run_dir: Path, reason: str) -> Path:
    """What a run leaves behind."""
    (run_dir / "metrics.jsonl").write_text("{}\n")
    (run_dir / "summary.json").write_text(json.dumps({"reason_for_stop": reason}))
    return run_dir


@pytest.mark.parametrize(
    "reason", ["solved", "stop_steps", "terminated", "interrupted", "no_envrunner"]
)
def test_only_a_run_that_reached_its_goal_is_over(tmp_path: Path, reason: str) -> None:
    reached = reason if reason in ("solved", "stop_steps") else ""
    assert goal_reached(_ended(tmp_path, reason), CONFIG, CONFIG) == reached


def test_a_run_is_not_resumed_for_seconds_that_it_has_trained_for() -> None:
    counters = {"trained": 9600, "training_time": 8.0}
    checkpoint = Checkpoint((1, 1), {}, {}, counters, CONFIG.flat(), {})
    past = RunConfig.from_flat({"stop_steps": 900, "stop_seconds": 7.5})
    with pytest.raises(ConfigError, match=r"stop_seconds = 7\.5: .* trained"):
        goals_behind(checkpoint, CONFIG, past)
    assert goals_behind(checkpoint, past, past) == [], "they are as they were"
    (steps,) = goals_behind(checkpoint, CONFIG, RunConfig.from_flat({"stop_steps": 900}))
    assert steps.startswith("stop_steps = 900: the run has trained on 9,600 steps already")
    further = RunConfig.from_flat({"stop_steps": 9601, "stop_seconds": 9.0})
    assert goals_behind(checkpoint, CONFIG, further) == []


def test_a_run_that_went_on_after_its_summary_and_was_killed_goes_on(tmp_path: Path) -> None:
    _ended(tmp_path, "solved")
    later = (tmp_path / "summary.json").stat().st_mtime_ns + 1
    os.utime(tmp_path / "metrics.jsonl", ns=(later, later))
    assert goal_reached(tmp_path, CONFIG, CONFIG) == ""


# What a script or a notebook shows of how a run ended.


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


def test_a_result_prints_as_the_run_concluded() -> None:
    run_dir, newest = Path("runs/<one>"), Path("runs/<one>/checkpoints/000001300")
    summary = {**SUMMARY, "run_dir": str(run_dir), "checkpoint": str(newest)}
    result = juggler.Result(summary, run_dir, newest)
    assert str(result).splitlines() == [
        "solved: return 480.2 after 312k steps in 9.4 s",
        "run directory: runs/<one>",
        "checkpoint: runs/<one>/checkpoints/000001300",
    ]
    shown = result._repr_html_()
    assert shown.count("<tr>") == 3
    assert "runs/&lt;one&gt;" in shown


def test_a_result_tells_the_best_checkpoint() -> None:
    best: dict[str, Any] = {
        "checkpoint": "runs/one/best/000000007",
        "return_mean": 480.25,
        "return_deviation": 3.0,
        "episodes": 10,
    }
    summary = {"solved": False, "wall_time": 1.0, "best": best}
    result = juggler.Result(summary, Path("runs/one"), None)
    assert result.best == Path("runs/one/best/000000007")
    shown = "best: runs/one/best/000000007, with 480.2 ± 3 in 10 episodes"
    assert str(result).splitlines()[-1] == shown


class _Notebook:
    """The parts of IPython in a kernel that a display uses."""

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


# RunClock: what counts as training, where a run goes on, and when its time is up.


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that is wound on by hand."""
    watch = SimpleNamespace(now=1000.0)
    for module in (run_clock, periodic_work):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: watch.now))
    return watch


def _checkpoint(**counters: float) -> Checkpoint:
    return cast(Checkpoint, cast(Any, SimpleNamespace(counters=counters)))


def test_both_go_on_where_a_run_is_resumed(watch: SimpleNamespace) -> None:
    clock = RunClock(990.0, _checkpoint(wall_time=500.0, training_time=480.0))
    assert clock.now() == (510.0, 480.0)
    clock.begin_training()
    watch.now += 20
    assert clock.now() == (530.0, 500.0)
    assert clock.is_up(500.0, patience=60)
    assert not clock.is_up(501.0, patience=60)


def test_time_is_up_after_so_much_training_however_long_the_start_took(
    watch: SimpleNamespace,
) -> None:
    clock = RunClock(1000.0)
    watch.now += 55
    assert not clock.is_up(10, patience=60)
    clock.begin_training()
    watch.now += 9
    assert not clock.is_up(10, patience=60)
    watch.now += 1
    assert clock.is_up(10, patience=60)


@pytest.mark.parametrize(("stop_seconds", "waits"), [(10, 60), (100, 100)])
def test_time_is_up_for_a_run_that_cannot_begin_too(
    watch: SimpleNamespace, stop_seconds: float, waits: float
) -> None:
    clock = RunClock(1000.0, _checkpoint(wall_time=500.0, training_time=5.0))
    watch.now += waits - 1
    assert not clock.is_up(stop_seconds, patience=60)
    watch.now += 1
    assert clock.is_up(stop_seconds, patience=60)


def test_the_end_of_an_interrupted_run_says_how_to_go_on() -> None:
    summary = {"reason_for_stop": "interrupted", "run_dir": "/runs/my run", "checkpoint": "/c/1"}
    assert conclude(summary).endswith("to resume: juggler train --resume '/runs/my run'")
    of_a_script = conclude({**summary, "command": "python"})
    assert of_a_script.endswith(
        "to resume: juggler.resume('/runs/my run', ...), with the script's own objects passed again"
    )
    assert "--resume" not in conclude({**summary, "checkpoint": None})
    assert "--resume" not in conclude({**summary, "reason_for_stop": "stop_steps"})


# Intervals: what is to be done every so often.


def test_each_thing_comes_after_its_own_interval_and_again_after_another(
    watch: SimpleNamespace,
) -> None:
    intervals = Intervals({"often": 1.0, "seldom": 2.5})
    named = []
    for _ in range(6):
        watch.now += 1.0
        named.append(intervals.due())
    seldom = ["often", "seldom"]
    assert named == [["often"], ["often"], seldom, ["often"], ["often"], seldom]


def test_what_was_missed_for_long_comes_once_and_an_interval_of_0_never(
    watch: SimpleNamespace,
) -> None:
    intervals = Intervals({"line": 5.0, "evaluation": 0.0})
    assert intervals.left() == 5.0
    watch.now += 100.0
    assert intervals.left() == 0.0
    assert intervals.due() == ["line"]
    assert intervals.due() == []


@pytest.mark.parametrize("keys", [{"metrics_steps": 60}, {"stop_steps": 6000}])
def test_lines_come_at_marks_of_steps_too(tmp_path: Path, keys: dict[str, int]) -> None:
    world = synchronous(tmp_path / "checkpoints", **keys)
    for turn in range(4):
        play_a_round(world)  # of 40 steps
        world.turn()
        if turn == 1:
            answer_the_snapshot(world)
            (written,) = world.written.gather(timeout=30)
            world._loop._handle(written)
            world.turn()
    told = [(line["step_mark"], line["env_steps_trained"]) for line in world.lines]
    assert told == [(60, 80), (120, 120)], "one line, however many turns are taken at a mark"
    assert [line["env_steps_in_flight"] for line in world.lines] == [0, 0]


# A background run: its metrics, its end, and the program's end.


class Trains:
    """Replace `juggler.train` by a scripted run."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.over = threading.Event()
        self.began = threading.Event()
        self.error: Exception | None = None

    def __call__(self, follower: juggler.Callback) -> juggler.Result:
        nobody, values = cast(DriverCore, None), cast(ChangedValues, None)
        self.run = juggler.Run(Path("runs/one"), {}, nobody, Progress(), self.stop, values, nobody)
        self.follower = follower
        follower.on_start(self.run)
        self.began.set()
        assert self.over.wait(60)
        if self.error:
            raise self.error
        return juggler.Result({"reason_for_stop": "stop_steps"}, self.run.run_dir, None)

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)
        self.over.set()

    def line(self, number: int) -> None:
        self.follower.on_metrics(self.run, {"updates": number})


@pytest.fixture(autouse=True)
def _no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_run, "share_forkserver", lambda: None)
    monkeypatch.setattr(start_run, "release_forkserver", lambda: None)
    monkeypatch.setattr(signals, "_SAME_SECONDS", 0.0)  # each signal counts


def test_metrics_come_one_by_one_until_the_run_is_over() -> None:
    trains = Trains()
    run = StartedRun(trains)
    assert (run.run_dir, run.running) == (Path("runs/one"), True)
    trains.line(1)
    trains.line(2)
    lines = run.metrics()
    assert next(lines) == {"updates": 2}, "the newest is there at once"
    trains.line(3)
    assert next(lines) == {"updates": 3}
    trains.line(4)
    trains.over.set()
    assert list(lines) == [{"updates": 4}]
    assert run.result(10).summary == {"reason_for_stop": "stop_steps"}
    assert not run.running
    assert list(run.metrics()) == [{"updates": 4}], "also when it is over"


def test_a_reader_of_metrics_that_stops_leaves_the_others() -> None:
    trains = Trains()
    run = StartedRun(trains)
    trains.line(1)
    first, second = run.metrics(), run.metrics()
    assert next(first) == next(second) == {"updates": 1}
    second.close()  # type: ignore[attr-defined]
    trains.line(2)
    assert next(first) == {"updates": 2}
    trains.over.set()
    run.result(10)


def test_numbers_are_set_and_errors_come_back() -> None:
    trains, values = Trains(), ChangedValues(RunConfig(), {"default": "default"})
    run = StartedRun(trains)
    trains.run._values = values
    run.set("lr", 1e-3, module_id="default")
    assert values.of("default", "default") == {"lr": 1e-3}
    with pytest.raises(ValueError, match="did you mean 'lr'"):
        run.set("lrr", 1e-3)
    trains.over.set()
    run.result(10)
    with pytest.raises(ValueError, match="the run has ended"):
        run.set("lr", 1e-3)


def test_stop_ends_it_and_a_result_can_be_waited_for_with_a_limit() -> None:
    trains = Trains()
    run = StartedRun(trains)
    with pytest.raises(TimeoutError, match=r"runs/one is still running after 0\.01 s"):
        run.result(0.01)
    run.stop("pruned")
    assert run.result(10).run_dir == Path("runs/one")
    assert trains.stopped == ["pruned"]


def test_what_fails_before_it_begins_is_raised_at_once() -> None:
    def fails(follower: juggler.Callback) -> juggler.Result:
        raise juggler.ConfigError("lr = x")

    with pytest.raises(juggler.ConfigError, match="lr = x"):
        StartedRun(fails)


def test_what_fails_later_is_raised_by_the_result_and_ends_the_metrics() -> None:
    trains = Trains()
    trains.error = juggler.RunFailed("the learner is lost")
    run = StartedRun(trains)
    trains.over.set()
    assert list(run.metrics()) == []
    with pytest.raises(juggler.RunFailed, match="the learner is lost"):
        run.result(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_ever_where_the_end_of_the_processes_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise ChildProcessError("another thread has waited for the forkserver")

    monkeypatch.setattr(start_run, "release_forkserver", fails)
    trains = Trains()
    run = StartedRun(trains)
    trains.over.set()
    assert run.result(timeout=30).run_dir == Path("runs/one")
    assert list(run.metrics()) == []


def test_an_interrupt_while_it_begins_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trains = Trains()

    def interrupted(_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(start_run._Follower, "wait_for_begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        StartedRun(trains)
    assert trains.over.wait(60)
    assert trains.stopped == ["interrupted"]


PROGRAM = """
import threading
from pathlib import Path
import juggler
from juggler.driver import start_run as started

started.share_forkserver = started.release_forkserver = lambda: None

def trains(follower):
    over = threading.Event()
    stop = lambda reason: (print(reason), over.set())
    run = juggler.Run(Path("one"), {}, None, None, stop, None, None)
    follower.on_start(run)
    while not over.wait(0.02):
        follower.on_metrics(run, {"updates": 1})

run = started.StartedRun(trains)
"""


@pytest.mark.long
def test_a_program_that_ends_ends_its_run_in_order() -> None:
    program = PROGRAM + "print('the program is over')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout.decode().split("\n")[:2] == ["the program is over", "program_ended"]
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_an_interrupt_while_a_result_is_waited_for_ends_the_run_in_order() -> None:
    program = PROGRAM + "print('waits', flush=True)\nrun.result()"
    begun = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert begun.stdout is not None
    assert begun.stdout.readline() == "waits\n"
    time.sleep(0.3)
    begun.send_signal(signal.SIGINT)
    assert begun.communicate(timeout=60)[0] == "program_ended\n"
    assert begun.returncode == -signal.SIGINT


# Signals: the first asks for the end, and the second one does not wait for it.


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    asked: list[str] = []
    called = threading.Event()
    with signals_become(lambda reason: (asked.append(reason), called.set())[0]):
        signal.raise_signal(signal.SIGTERM)
        assert called.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == ["terminated"]


def test_a_second_sigterm_ends_a_program_as_it_ends_every_other() -> None:
    with signals_become(lambda _: None) as caught:
        signal.raise_signal(signal.SIGTERM)
        assert caught.number == signal.SIGTERM
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)


def test_no_signal_cuts_the_clean_up_short() -> None:
    asked: list[str] = []
    with signals_become(asked.append):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a third one
    with signals_become(asked.append) as caught:
        signal.raise_signal(signal.SIGINT)
        caught.no_more()
        signal.raise_signal(signal.SIGINT)


def test_a_run_that_nohup_started_outlives_its_terminal() -> None:
    asked: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_become(asked.append) as caught:
            signal.raise_signal(signal.SIGHUP)
        assert caught.number == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert asked == []
