"""A whole driver with fake runners and learners. Prints one JSON line about its costs.

With --watched, there is everything around the run that people may have: a page that a browser looks
at, trackers, and a callback for all events. What these take of the driver's thread is measured
by itself, because the CPU time of two runs differs by more than that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
from fakes import LIVE_STEPS, ROWS, STEPS, Script, Waits, run_fakes

from juggler.driver.callbacks import Callback, Callbacks
from juggler.driver.config import RunConfig
from juggler.driver.driver import Driver, InheritedState, Listen, RunFailed, StartSettings
from juggler.driver.reporting.run_directory import SUMMARY_FILE, RunDirectory
from juggler.driver.reporting.wording import Level, Progress
from juggler.driver.run_status import StatusReader
from juggler.driver.start_run import with_callbacks

WARM_UP_LINES = 1  # metrics lines, one a second
#: What the driver's thread does for those around a run.
AROUND = (
    (Callbacks, "metrics"),
    (Callbacks, "updated"),
    (Callbacks, "deliver"),
    (StatusReader, "read"),
)


@dataclass(frozen=True, slots=True)
class Moment:
    """What the driver has used and done up to one moment."""

    time: float  # of the monotonic clock
    cpu: float  # seconds, of all its threads
    megabytes: float  # resident
    updates: int
    batches: int  # sampled
    around: float  # CPU seconds of its thread, for what is around the run


class Complaints(Progress):
    """Records errors: no worker should leave, and nothing else go wrong. A page is looked at."""

    def message(self, text: str, level: Level = "info") -> None:
        if level != "info":
            print(text, file=sys.stderr)
        elif text.startswith("page: "):
            context = multiprocessing.get_context("spawn")
            context.Process(target=look, args=(text.removeprefix("page: "),), daemon=True).start()


def look(url: str) -> None:
    """What a browser does: it asks once a second for what is new."""
    seen, (run,) = "", json.load(urlopen(f"{url}api/runs"))["runs"]
    while True:
        urlopen(f"{url}api/runs").read()
        told = json.load(urlopen(f"{url}api/run?id={run['id']}&detail=1&seen={seen}"))
        assert told["status"], "the driver answers"
        seen = told["curves"]["seen"]
        time.sleep(1.0)


class Hears(Callback):
    """What a script may do: it keeps the metrics of each line and of each update."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.updates = 0

    def on_metrics(self, run: Any, metrics: Any) -> None:
        self.lines.append(dict(metrics))

    def on_update(self, run: Any, module_id: str, metrics: Any) -> None:
        self.updates += 1


class MeasuredDriver(Driver):
    """Runs until all workers are there and N seconds have been measured.

    Attributes:
        moments: the start of the measurement, each metrics line since, and the end.
        most_open: batches in the books at once, from request to end.
        line_seconds: CPU time of each metrics line.
        around_seconds: CPU time of the driver's thread for what is around the run.
    """

    def measure(self, script: Script, seconds: float, waits: Any) -> dict[str, Any]:
        """Returns the run's summary; `waits` gets the waiting times of runners."""
        self._script, self._seconds, self._waits = script, seconds, waits
        self._complete_lines = 0
        self.moments: list[Moment] = []
        self.most_open = 0
        self.line_seconds: list[float] = []
        self._top_up, self._loop.top_up = self._loop.top_up, self._measured_top_up
        self._write_line, self._periodic_work.write_line = (
            self._periodic_work.write_line,
            self._measured_line,
        )
        self.around_seconds = 0.0
        if self._parts.callbacks.callbacks:
            for kind, name in AROUND:
                setattr(kind, name, self._measured(getattr(kind, name)))
        with suppress(RunFailed):  # fake learners have no weights for the last checkpoint
            self.run()
        summary: dict[str, Any] = json.loads((self._directory.path / SUMMARY_FILE).read_bytes())
        return summary

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            begun = time.thread_time()
            found = call(*arguments)
            self.around_seconds += time.thread_time() - begun
            return found

        return measured

    def _start(self) -> None:
        super()._start()
        context = multiprocessing.get_context("spawn")
        arguments = (self._bound[-1], self._script, self._waits)
        context.Process(target=run_fakes, args=arguments, daemon=True).start()

    def _measured_top_up(self) -> None:
        self._top_up()
        for module in self._parts.core.modules.values():
            ledger = module.ledger
            is_open = len(ledger.requested) + len(ledger.held) + len(ledger.updating)
            self.most_open = max(self.most_open, is_open)

    def _measured_line(self) -> dict[str, Any]:
        begun = time.thread_time()
        line = self._write_line()
        self.line_seconds.append(time.thread_time() - begun)
        script, here = self._script, (line["num_env_runners"], line["num_learners"])
        self._complete_lines += here == (script.runners, script.learners)
        if self._complete_lines > WARM_UP_LINES and not self._parts.end.reached:
            self.moments.append(_now(line, self.around_seconds))
            if self.moments[-1].time >= self.moments[0].time + self._seconds:
                self._parts.end.stop("measured")
        return line


def _now(line: dict[str, Any], around: float) -> Moment:
    megabytes = psutil.Process().memory_info().rss / 1e6
    batches = line["env_steps_sampled"] // LIVE_STEPS
    cpu = time.process_time()
    return Moment(time.monotonic(), cpu, megabytes, line["updates"], batches, around)


def _config(script: Script, batches: int, staleness: int) -> RunConfig:
    """`batches`: those of each learner in an update."""
    return RunConfig.from_flat(
        {
            "envs_per_runner": ROWS,
            "fragment_steps": STEPS,
            "num_env_runners": script.runners,
            "num_learners": script.learners,
            "batch_size": LIVE_STEPS * batches * script.learners,
            "max_staleness": staleness or _deep(script, batches),
            "checkpoint_seconds": 1e6,
            "stop_seconds": 90.0,  # in case a worker never comes
        }
    )


def _deep(script: Script, batches: int) -> int:
    """So much that no runner ever waits for admission: its two requests are always in flight."""
    updates = 4 * script.runners / (batches * script.learners)
    return 2 * int(updates + 4)


def measure(
    script: Script, batches: int, staleness: int, seconds: float, watched: bool, track: list[str]
) -> dict[str, Any]:
    """One configuration's figures."""
    config = _config(script, batches, staleness)
    config.driver.web, config.driver.track = watched, track if watched else []
    how = StartSettings(started=time.monotonic(), listen=Listen("127.0.0.1:0"))
    if watched:
        how = with_callbacks(replace(how, callbacks=(Hears(),)), config.driver)
    queue = multiprocessing.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        path = Path(directory, "run")
        driver = MeasuredDriver(
            config,
            RunDirectory.create(path, config.flat(), "bench"),
            Complaints(),
            how,
            InheritedState(),
            (),
        )
        summary = driver.measure(script, seconds, queue)
        waits = queue.get(timeout=30)
        line_bytes = len((path / "metrics.jsonl").read_bytes().splitlines()[-1])
    if summary["reason_for_stop"] != "measured":
        raise RuntimeError(f"not all of {script} worked for {seconds} s")
    _check(summary)
    begin, end = driver.moments[0], driver.moments[-1]
    spent, cpu = end.time - begin.time, end.cpu - begin.cpu
    batches_booked = end.batches - begin.batches
    admitted = (config.learner.max_staleness + 1) // 2 * batches * script.learners
    assert driver.most_open <= admitted, f"{driver.most_open} batches open, {admitted} admitted"
    return {
        "receipts_per_second": batches_booked / spent,
        "updates_per_second": (end.updates - begin.updates) / spent,
        "cpu_share": cpu / spent,
        "around_share": (end.around - begin.around) / spent,
        "cpu_microseconds": 1e6 * cpu / batches_booked if batches_booked else None,
        "most_open": driver.most_open,
        "admitted": admitted,
        "megabytes": end.megabytes,
        "megabytes_more": end.megabytes - begin.megabytes,
        "metrics_line_kilobytes": line_bytes / 1e3,
        "metrics_line_ms": 1e3 * statistics.median(driver.line_seconds),
        **_fairness(script, waits, begin.time, end.time),
    }


def _check(summary: dict[str, Any]) -> None:
    """Check that the driver's counts equal those of the learners."""
    theirs = sum(counts["trained"] for counts in summary["learner_steps"].values())
    if theirs != summary["env_steps_trained"]:
        raise AssertionError(f"{summary['env_steps_trained']} steps trained; learners: {theirs}")


def _fairness(script: Script, waits: Waits, begin: float, end: float) -> dict[str, Any]:
    """Fairness among equally fast runners, and their longest wait between requests."""
    within = {
        runner: [wait for at, wait in own if begin <= at < end] for runner, own in waits.items()
    }
    every = sorted(wait for own in within.values() for wait in own)
    found: dict[str, Any] = {}
    if every:
        found["wait_p50_ms"] = 1e3 * every[len(every) // 2]
        found["wait_p99_ms"] = 1e3 * every[len(every) * 99 // 100]
        found["wait_max_ms"] = 1e3 * every[-1]
    for name, slow in (("fast", False), ("slow", True)):
        alike = [
            len(own) for runner, own in within.items() if (script.slowness(runner) > 1) == slow
        ]
        if alike:
            mean_of_squares = statistics.mean(count**2 for count in alike)
            jain = statistics.mean(alike) ** 2 / mean_of_squares if mean_of_squares else 0.0
            found[name] = {"least": min(alike), "most": max(alike), "jain": jain}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runners", type=int, default=256)
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--sample-ms", type=float, default=0.0)
    parser.add_argument("--update-ms", type=float, default=0.0)
    parser.add_argument("--slow-every", type=int, default=0)
    parser.add_argument("--batches", type=int, default=8, help="of each learner in an update")
    parser.add_argument("--staleness", type=int, default=0, help="0: no runner waits for admission")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--watched", action="store_true", help="page, trackers and a callback")
    parser.add_argument("--track", nargs="*", default=["tensorboard"], help="with --watched")
    given = vars(parser.parse_args())
    names = ("batches", "staleness", "seconds", "watched", "track")
    rest = [given.pop(name) for name in names]
    print(json.dumps(measure(Script(**given), *rest)))


if __name__ == "__main__":
    main()
