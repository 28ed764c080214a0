"""`juggler tune`: finds sizes that suit this machine by timing short runs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from juggler.cli.arguments import (
    ConfigArguments,
    keys_given,
    parse_first,
    parse_rest,
    report_errors,
)
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_files import differing, load_config_and_keys, read_toml
from juggler.driver.reporting.run_directory import (
    CONFIG_FILE,
    last_summary,
    metrics_table,
    to_toml,
)

_MIN_SECONDS: Final = 1.0
_PROBES: Final = 12  # runs, including their starts, that share `--seconds`
_GAIN: Final = 1.05  # minimum gain of a larger size, for its additional processes
_MOST_RUNNERS: Final = 64
_MIN_STEPS: Final = 8  # shorter fragments bootstrap nearly every return
_ABOUT: Final = 1.1  # maximum size of an update's batches, relative to the update
#: Keys to tune, in the order of their trials.
_TRIED: Final = ("envs_per_runner", "num_env_runners", "learner_threads")
KEYS: Final = (*_TRIED, "fragment_steps")


@dataclass(kw_only=True)
class Arguments(ConfigArguments):
    """Find a fast configuration for this machine.

    Times short runs for about a minute, and reports the best numbers of EnvRunners, environments
    and threads, and the best fragments.
    """

    write: str | None = None
    """File to write with these sizes, for `juggler train`."""

    seconds: float = 60.0
    """Approximate duration of the measurement, in seconds."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Result of a short run."""

    config: RunConfig  # configuration of the run, with the values that it chose
    rate: float  # steps trained on per second; 0: no update
    busy: float  # share of the time that the learner worked

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the run by key."""
        flat = self.config.flat()
        return {key: flat[key] for key in KEYS}

    def __str__(self) -> str:
        sizes = self.sizes
        shape = (
            f"{sizes['num_env_runners']} × {sizes['envs_per_runner']} environments, "
            f"{sizes['fragment_steps']} steps"
        )
        if (threads := sizes["learner_threads"]) > 1:
            shape += f", {threads} threads of the learner"
        rate = int(float(f"{self.rate:.2g}"))  # further digits would be noise
        return f"{shape}: about {rate:,} steps/s, the learner busy {self.busy:.0%}"


def run(arguments: Sequence[str]) -> int:
    return report_errors("tune", lambda: _tune(arguments))


def _tune(arguments: Sequence[str]) -> int:
    first, algorithm = parse_first(Arguments, arguments, "tune")
    base, in_file = load_config_and_keys(first.config, algorithm)
    given = parse_rest(Arguments, arguments, "tune", base)
    if not given.seconds >= _MIN_SECONDS:
        raise ConfigError(f"--seconds must be at least {_MIN_SECONDS:g}, not {given.seconds}")
    # Given keys are written even if they have their defaults' values.
    keys = in_file | keys_given(arguments)
    # A measurement that fails leaves no file.
    with ExitStack() as undo:
        if given.write is not None:
            undo.callback(_new_file(given.write).unlink)
        now, best = search(given.run, keys, given.seconds)
        if given.write is not None:
            Path(given.write).write_bytes(_content(best, keys))
        undo.pop_all()
    print(f"\nas configured: {now}\nadvised:       {best}")
    for key, value in best.sizes.items():
        before = now.sizes[key]
        print(f"  {key} = {value}" + (f"  (was {before})" if before != value else ""))
    print("batch_size is unchanged: another size would change what is learned.")
    if given.write is not None:
        print(f"\njuggler train {given.write}")
    return 0


def search(config: RunConfig, given: Collection[str], seconds: float) -> tuple[Timed, Timed]:
    """Time a configuration, and then other sizes, one key at a time.

    A size doubles while steps per second grow by 5 %; of equally fast sizes, the first is chosen,
    which has the fewest processes.

    Raises:
        ConfigError: the run cannot be timed; the message has the reason.
    """
    from juggler.driver.driver import RunFailed
    from juggler.runtime.actors.processes import release_forkserver, share_forkserver

    if config.env_runner.gateway or config.env_runner.dataset:
        what = "simulators dial in" if config.env_runner.gateway else "nothing is sampled"
        raise ConfigError(f"only runs that sample on this host can be timed, but here {what}")
    ends, share = time.monotonic() + seconds, max(seconds / _PROBES, _MIN_SECONDS)
    share_forkserver()
    try:
        _print(f"timing runs of {config.env_runner.env} for about {seconds:g} s")
        now = best = time_run(config, given, share)
        if not now.rate:
            raise ConfigError(f"the first run made no update in {share:.1f} s: give more --seconds")
        # Each key is tuned with the best values of those before it.
        config = now.config  # with the sizes that it chose
        for key in _TRIED:
            for values in _sizes(best.config, key):
                if time.monotonic() >= ends:
                    _print(f"there was no time for other {key}: give more --seconds")
                    break
                try:
                    # Sizes beyond this host's memory or limits raise, and end the search for
                    # this key.
                    other = RunConfig.from_flat({**best.config.flat(), **values})
                    timed = time_run(other, config.flat(), share)
                except (ConfigError, RunFailed) as error:
                    _print(f"{key} = {values[key]} fails: {error}")
                    break
                if not timed.rate:
                    late = f"too slow to measure in {share:.1f} s: give more --seconds"
                    _print(f"{key} = {values[key]} is {late}")
                if timed.rate < _GAIN * best.rate:
                    break
                best = timed
    finally:
        release_forkserver()
    return now, best


def _sizes(config: RunConfig, key: str) -> Iterator[dict[str, int]]:
    """Yield doubled values of a key, with fitting fragments."""
    flat, cores = config.flat(), len(os.sched_getaffinity(0))
    most = {"num_env_runners": _MOST_RUNNERS, "learner_threads": cores}.get(key, 4096)
    value = int(flat[key])
    while (value := 2 * value) <= most:
        sizes = {**flat, key: value}
        rows = sizes["envs_per_runner"]
        rows *= sizes["num_env_runners"] if config.driver.synchronous else 1  # rows of an update
        steps = min(flat["fragment_steps"], int(_ABOUT * flat["batch_size"]) // rows)
        if steps < min(flat["fragment_steps"], _MIN_STEPS):
            return
        yield {key: value, "fragment_steps": steps}


def time_run(config: RunConfig, given: Collection[str], seconds: float) -> Timed:
    """Train for a few seconds, in a directory that is deleted afterwards."""
    from juggler.driver.driver import RunFailed, StartSettings
    from juggler.driver.start_run import start_run

    with tempfile.TemporaryDirectory(prefix="juggler-tune-") as directory:
        run_dir = Path(directory, "run")
        # Only its time ends it, and nothing else takes any of the cores.
        changed: dict[str, object] = {
            "run_dir": str(run_dir),
            "stop_return": None,
            "stop_steps": None,
            "stop_seconds": seconds,
            "evaluation_seconds": 0.0,
            "progress": "off",
            "track": [],
            "web": False,
        }
        own = RunConfig.from_flat({**config.flat(), **changed})
        try:
            start_run(own, {*given, *changed}, StartSettings(time.monotonic()))
        except RunFailed:
            # A run in which nothing went wrong was only too slow for its time.
            end, _ = last_summary(run_dir)
            if end.get("reason_for_stop") != "stop_seconds" or end["restarts"]:
                raise
        lines = [line for line in metrics_table(run_dir) if line["env_steps_trained"]]
        chose = RunConfig.from_flat(read_toml(run_dir / CONFIG_FILE))
    if not lines:
        return Timed(config, 0.0, 0.0)
    first, last = lines[len(lines) // 3], lines[-1]
    if first is last:  # too few lines to leave out the first updates, which are slow
        first = dict.fromkeys(last, 0.0)
    passed = max(last["training_time"] - first["training_time"], 1e-9)
    rate = (last["env_steps_trained"] - first["env_steps_trained"]) / passed
    waited = [each.get("seconds/learner/waiting", 0.0) for each in (first, last)]
    busy = 1 - (waited[1] - waited[0]) / passed / max(1, last["num_learners"])
    # The sizes that the run chose, without what was changed here.
    unchanged = {key: value for key, value in config.flat().items() if key in changed}
    chosen = RunConfig.from_flat({**chose.flat(), **unchanged})
    _print(str(timed := Timed(chosen, rate, min(1.0, max(0.0, busy)))))
    return timed


def _new_file(path: str) -> Path:
    """Make a new file, before the measurement."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        raise ConfigError(f"--write {path}: it already exists, and is not overwritten") from None
    except OSError as error:
        raise ConfigError(f"--write {path}: {error.strerror}") from error
    return Path(path)


def _content(best: Timed, given: Collection[str]) -> bytes:
    """Return sizes and other non-default keys for `juggler train`."""
    flat = best.config.flat()
    values = differing({key: flat[key] for key in flat if key in {*given, *KEYS}}, KEYS)
    return f"# Sizes that `juggler tune` advised. Timed: {best}.\n".encode() + to_toml(values)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
