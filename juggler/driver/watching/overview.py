"""Overview of many runs: what exists, and its state."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from juggler.driver.reporting.metrics import RETURN_WINDOW
from juggler.driver.reporting.run_directory import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    LineFile,
    RunDirectoryError,
    RunState,
    last_summary,
    number,
    read_or_problem,
    state_of,
)
from juggler.driver.reporting.wording import algorithms
from juggler.runtime.checkpoints.checkpoint import DIRECTORY
from juggler.runtime.plain_files import read_toml_table

_STEPS: Final = "env_steps_trained"
_LONGEST: Final = 10_000  # characters of a text
_DEEPEST: Final = 3  # directory levels between a given directory and a run
_MOST_SEARCHED: Final = 20_000  # directories
MOST_RUNS: Final = 1000  # maximum number of runs in the overview: the newest


@dataclass(frozen=True, slots=True)
class Overview:
    """A run as one row of an overview."""

    name: str  # name of the directory, or its path if another run has the same name
    directory: str
    env: str  # as the configuration names it
    algorithm: str  # of the run, and of modules with their own
    # The mean return at which the run is solved; None: no goal, or several
    goal: float | None
    state: RunState
    reason: str  # for its end, from the summary; "": none
    return_last: float | None  # mean over the last 100 episodes; None: no episode yet
    # Highest mean over 100 episodes; the last mean, if fewer have ended
    return_best: float | None
    env_steps: int  # trained on
    wall_time: float  # in seconds
    checkpoints: tuple[int, ...]  # update numbers, the newest first
    written: float  # time of the run's last write, in seconds since 1970
    problem: str  # why data are missing; "": complete


class _Line(msgspec.Struct, gc=False):
    """The needed fields of a line: five times faster than reading all."""

    env_steps_trained: float
    wall_time: float
    episode_return_mean: float | None = None
    episodes: int = RETURN_WINDOW  # that have ended


class RunReader:
    """Reads the same run repeatedly, each time only new lines."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir, self._name = run_dir, name
        self._metrics = LineFile(run_dir / METRICS_FILE)
        self._decode = msgspec.json.Decoder(_Line).decode
        self._last: _Line | None = None
        self._best = -math.inf
        self._seen: tuple[tuple[int, int], ...] = ()
        self._overview: Overview | None = None

    def read(self) -> Overview:
        seen = tuple(_stamps(self.run_dir))
        known = self._overview
        if known is None or known.state == "running" or seen != self._seen:
            self._overview = known = self._read_all()
            self._seen = seen
        return known

    def _read_all(self) -> Overview:
        config, of_config = read_config(self.run_dir)
        summary, of_summary = last_summary(self.run_dir)
        of_checkpoints = ""
        if not (self.run_dir / DIRECTORY).is_dir():
            of_checkpoints = f"there is no directory {DIRECTORY}"
        problems = of_config, self._read(), of_summary, of_checkpoints
        try:
            return self._overview_of(config, summary, *problems)
        except Exception as error:  # a damaged directory must not affect other runs
            return self._overview_of({}, {}, *problems, f"damaged: {type(error).__name__}: {error}")

    def _overview_of(
        self, config: dict[str, Any], summary: dict[str, Any], *problems: str
    ) -> Overview:
        # Any file may be damaged or of another program, so every value is checked.
        last = self._last or _Line(0.0, 0.0)
        return Overview(
            name=text_of(self._name),
            directory=text_of(self.run_dir),
            env=text_of(config.get("env", "")),
            algorithm=text_of(algorithms(config)) if config else "",
            goal=_number(config.get("stop_return")),
            state=state_of(self.run_dir, summary),
            reason=text_of(summary.get("reason_for_stop") or ""),
            # The summary also has what happened after the last line.
            return_last=_number(summary.get("episode_return_mean"), last.episode_return_mean),
            return_best=_number(self._best, last.episode_return_mean),
            env_steps=int(_number(summary.get(_STEPS), last.env_steps_trained) or 0),
            wall_time=_number(summary.get("wall_time"), last.wall_time) or 0.0,
            checkpoints=checkpoint_updates(self.run_dir),
            written=_written(self.run_dir),
            problem=text_of("; ".join(filter(None, problems))),
        )

    def _read(self) -> str:
        """Read new lines, and return a problem or ""."""
        try:
            for text in self._metrics.new_lines(self._restart):
                with suppress(msgspec.MsgspecError, RecursionError):
                    self._last = line = self._decode(text)
                    mean = line.episode_return_mean
                    # The first episodes that end are short, and their returns mean little.
                    if mean is not None and line.episodes >= RETURN_WINDOW:
                        self._best = max(mean, self._best)
        except FileNotFoundError:
            return f"there is no {METRICS_FILE}"
        except OSError as error:
            return f"cannot read {METRICS_FILE}: {error.strerror}"
        return ""

    def _restart(self) -> None:
        self._last, self._best = None, -math.inf


def find_runs(directories: list[Path]) -> list[Path]:
    """Return the runs in these directories, the newest first."""
    found: dict[Path, Path] = {}
    for directory in directories:
        if not directory.is_dir():
            what = "is a file" if directory.exists() else "does not exist"
            raise RunDirectoryError(f"{directory} {what}; give the directory of a run, or of runs")
        try:
            with os.scandir(directory):  # otherwise it would seem empty
                pass
        except OSError as error:
            raise RunDirectoryError(f"cannot read {directory}: {error.strerror}") from error
        for run_dir in _walk(directory, [_MOST_SEARCHED], _DEEPEST):
            found.setdefault(run_dir.resolve(), run_dir)
    return sorted(found.values(), key=_written, reverse=True)[:MOST_RUNS]


def names_of(run_dirs: list[Path]) -> list[str]:
    """Name runs by directory, or by path if names repeat."""
    names = [each.resolve().name for each in run_dirs]
    often = Counter(names)
    return [
        name if often[name] == 1 else str(run_dir)
        for name, run_dir in zip(names, run_dirs, strict=True)
    ]


def _walk(directory: Path, left: list[int], depth: int) -> Iterator[Path]:
    left[0] -= 1
    if _is_run(directory):
        yield directory
        return
    if depth == 0 or left[0] <= 0:
        return
    with suppress(OSError), os.scandir(directory) as entries:
        below = sorted(  # links last, so that a run is listed by its own name
            (each.is_symlink(), each.name)
            for each in entries
            if not each.name.startswith(".") and each.is_dir(follow_symlinks=depth == _DEEPEST)
        )
        for _, name in below:
            yield from _walk(directory / name, left, depth - 1)


def _is_run(directory: Path) -> bool:
    """Return whether a directory has at least two files of a run."""
    kept = [directory / name for name in (CONFIG_FILE, METRICS_FILE)]
    try:
        found = [*(each.is_file() for each in kept), (directory / DIRECTORY).is_dir()]
    except OSError:  # it may not be readable
        return False
    return sum(found) >= 2


def read_config(run_dir: Path) -> tuple[dict[str, Any], str]:
    """Read a run's flat configuration; return it, and a problem or ""."""
    return read_or_problem(run_dir / CONFIG_FILE, read_toml_table)


def checkpoint_updates(run_dir: Path) -> tuple[int, ...]:
    """List updates of a run's checkpoints, the newest first."""
    try:
        names = os.listdir(run_dir / DIRECTORY)
    except OSError:
        return ()
    updates = (int(name) for name in names if re.fullmatch("[0-9]{9,15}", name))
    return tuple(sorted(updates, reverse=True))


def _written(run_dir: Path) -> float:
    """Return the run's last write, in seconds since 1970; 0.0 if unknown."""
    return max(time for time, _ in _stamps(run_dir)) / 1e9


def _stamps(run_dir: Path) -> Iterator[tuple[int, int]]:
    """Yield change times and sizes of a run's parts."""
    for name in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, DIRECTORY):
        try:
            found = (run_dir / name).stat()
        except OSError:
            yield 0, 0
        else:
            yield found.st_mtime_ns, found.st_size


def _number(*values: Any) -> float | None:
    """Return the first of these values that is a finite number."""
    return next((found for each in values if math.isfinite(found := number(each))), None)


def text_of(value: object) -> str:
    """Return text, with question marks for bytes that are not UTF-8."""
    return str(value)[:_LONGEST].encode(errors="replace").decode()
