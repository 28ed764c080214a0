"""Describes a run's numbers and its end for people."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from juggler.runtime.near_matches import all_of, one_of

Level = Literal["info", "warning", "error"]

EPISODE: Final = ""  # name for the return of an episode, summed over all agents

_OLD_SECONDS = 10.0  # seconds without an ended episode after which a mean return is old

#: Explains the returns of a league's players.
LEAGUE_RETURNS = (
    "each player's own matches, including matches with frozen players: they need not add up"
)

_SHOWN = 4  # maximum number of modules or agents with returns in a line of text

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

#: Used instead of a command name: the run needs its script, which no command can import.
IN_PYTHON = "python"


def describe(config: Mapping[str, Any]) -> str:
    """Describe a run by its flat configuration: environment, algorithm, stop conditions."""
    until = [
        text.format(quantity(config[key]))
        for key, text in (("stop_steps", "{} steps"), ("stop_seconds", "{} seconds"))
        if config.get(key) is not None
    ]
    if (stop_return := config.get("stop_return")) is not None:
        until.insert(0, f"a return of {_returns(stop_return, quantity)}")
    goal = f" until {one_of(until) or 'it is interrupted'}"
    seed = f", seed {config['seed']}" if "seed" in config else ""
    return f"{config.get('env')} with {algorithms(config)}{goal}{seed}"


def algorithms(config: Mapping[str, Any]) -> str:
    """Name all algorithms of a run: "ppo (prey: impala)"."""
    own = [
        f"{module_id}: {table['algorithm']}"
        for module_id, table in (config.get("modules") or {}).items()
        if table.get("algorithm", config.get("algorithm")) != config.get("algorithm")
    ]
    return f"{config.get('algorithm')}{_in_brackets(', '.join(own))}"


def each_return(line: Mapping[str, Any], most: int | None = _SHOWN) -> str:
    """Describe the mean return of each module, or else each agent.

    The names in `stop_return` come first. "" with one agent.

    Args:
        most: number of names to show; None: all.
    """
    of_each = line.get("by_module") or line.get("by_agent") or {}
    returns = {name: each["episode_return_mean"] for name, each in of_each.items()}
    goals = line.get("stop_returns") or {}
    words = [named_returns({name: mean}) for name, mean in {**goals, **returns}.items()]
    more = len(words[most:]) if most else 0
    return ", ".join(words[:most]) + (f" and {more} more" if more else "")


def named_returns(values: Mapping[str, float | None]) -> str:
    """Describe returns by name: "hunter 0.65, prey -0.65"."""
    return named({name: number(value) for name, value in values.items()})


def named(words: Mapping[str, str]) -> str:
    """List words by name: "hunter 0.65, prey -0.65"."""
    return ", ".join(f"{name} {word}".lstrip() for name, word in words.items())


def _returns(value: float | Mapping[str, float], words: Callable[[float], str]) -> str:
    """Describe one return, or a table of returns by name."""
    by_name = value if isinstance(value, Mapping) else {"": value}
    return all_of(f"{name} {words(each)}".lstrip() for name, each in by_name.items())


def mean_return(line: Mapping[str, Any], width: int = 0, most: int | None = _SHOWN) -> str:
    """Describe mean returns of the last episodes, and their age."""
    old = f"{age(line)} old" if age(line) else ""
    shown = f"{number(line.get('episode_return_mean')):>{width}}"
    return f"{shown}{_in_brackets(each_return(line, most))}{_in_brackets(old)}"


def missing_steps(line: Mapping[str, Any]) -> str:
    """Describe the steps missing from a replay before learning, or ""."""
    modules = line.get("modules") or {}
    trained = line.get("by_module", modules)  # not the players that have left a league
    missing = {name: modules.get(name, {}).get("replay_steps_missing", 0) for name in trained}
    name = max(missing, key=missing.__getitem__, default="")
    if not missing.get(name):
        return ""
    whose = f"the replay of {name}" if len(trained) > 1 else "the replay"
    steps = "step" if missing[name] == 1 else "steps"
    return f"learning waits for {quantity(missing[name])} more {steps} in {whose}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def conclude(summary: Mapping[str, Any]) -> str:
    """Describe a run's summary in a few lines, "name: value"."""
    steps = (_confirmed(summary) or summary).get("env_steps_trained", 0)
    lines = [
        f"{how_it_ended(summary)}: return {_mean(summary)} after {quantity(steps)} steps "
        f"in {clock(summary.get('wall_time', 0.0))}{_parts(summary)}{_proof(summary)}"
    ]
    # Readers expect the returns of two players to add up to 0, and in a league they need not.
    if summary.get("league") and summary.get("by_module"):
        lines.append(f"returns: {LEAGUE_RETURNS}")
    for key, name in (("run_dir", "run directory"), ("checkpoint", "checkpoint")):
        if summary.get(key):
            lines.append(f"{name}: {here(summary[key])}")
    # What operators look for next: the best weights, and processes that died.
    if best := summary.get("best"):
        played = spread(best["return_mean"], best["return_deviation"])
        lines.append(
            f"best: {here(best['checkpoint'])}, with {played} in {best['episodes']} episodes"
        )
    if restarts := summary.get("restarts", 0):
        last = summary.get("last_restart")
        lines.append(f"restarts: {restarts:,}{f', the last of {last}' if last else ''}")
    is_signalled = summary.get("reason_for_stop") in ("interrupted", "terminated")
    if is_signalled and summary.get("checkpoint"):
        resume_command = resuming(summary["run_dir"], summary.get("command", "train"))
        lines.append(f"to resume: {resume_command}")
    return "\n".join(lines)


def resuming(run_dir: str | Path, command: str = "train") -> str:
    """Return the command that resumes a run."""
    if command == IN_PYTHON:
        return f"juggler.resume({here(run_dir)!r}, ...), with the script's own objects passed again"
    return f"juggler {command} --resume {shlex.quote(here(run_dir))}"


def here(path: str | Path) -> str:
    """Return a path relative to the working directory, if possible."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working directory was deleted
        return str(path)


def _parts(summary: Mapping[str, Any]) -> str:
    if "startup_time" not in summary:
        return ""
    startup, training = clock(summary["startup_time"]), clock(summary["training_time"])
    return f" (start-up {startup}, training {training})"


def age(line: Mapping[str, Any]) -> str:
    """Describe how long no episode has ended, or "" if not long."""
    seconds = line.get("episode_return_age")
    return "" if seconds is None or seconds < _OLD_SECONDS else clock(seconds)


def how_it_ended(summary: Mapping[str, Any]) -> str:
    """Describe the end of a run: "ended (stop_steps)"."""
    return "solved" if summary.get("solved") else f"ended ({summary.get('reason_for_stop')})"


def _confirmed(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the evaluation that confirms a solved run, or None."""
    confirmation: Mapping[str, Any] = summary.get("confirmation") or {"confirmed": False}
    return confirmation if confirmation["confirmed"] else None


def _proof(summary: Mapping[str, Any]) -> str:
    if found := _confirmed(summary):
        mean, deviation = found["return_mean"], found["return_deviation"]
        played = (
            named({name: spread(mean[name], deviation[name]) for name in mean})
            if isinstance(mean, Mapping)
            else spread(mean, deviation)
        )
        return f", confirmed by {found['episodes']} episodes: {played}"
    why_not = (summary.get("confirmation") or {}).get("why_not")
    return f", not confirmed: {why_not}" if why_not else ""


def _mean(summary: Mapping[str, Any]) -> str:
    if found := _confirmed(summary):
        return _returns(found["training_return_mean"], number)
    return mean_return(summary)


def time_left(config: Mapping[str, Any], line: Mapping[str, Any]) -> float | None:
    """Estimate the seconds until `stop_steps` or `stop_seconds` ends the run; None: never."""
    left = []
    if (steps := config.get("stop_steps")) is not None and line.get("steps_per_second"):
        left.append((steps - line["env_steps_trained"]) / line["steps_per_second"])
    if (seconds := config.get("stop_seconds")) is not None:
        left.append(seconds - line.get("training_time", 0.0))
    return max(0.0, min(left)) if left else None


def plain(text: str) -> str:
    """Remove control characters and escape sequences from a text."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n"))


def quantity(value: float) -> str:
    """Format a count with three digits and a letter: 950, 12.3k, 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def number(value: float | None) -> str:
    """Format a number with about four digits; None as a dash."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.2f}" if size < 100 else f"{value:.1f}" if size < 10_000 else f"{value:.4g}"


def spread(mean: float, deviation: float) -> str:
    """Format a mean and a standard deviation."""
    return f"{number(mean)} ± {quantity(deviation)}"


def clock(seconds: float) -> str:
    """Format a duration: 9.4 s, 1:23 or 2:03:04."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Progress:
    """Shows a run to people, in one thread; this one shows nothing."""

    def waiting(self, text: str, wall_time: float) -> None:
        """Show repeatedly what the first update waits for, also before `start`."""

    def stop_waiting(self) -> None:
        """Stop showing what the run waits for before `start`."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Show that the run starts with this flat configuration."""

    def update(self, line: Mapping[str, Any]) -> None:
        """Show a new metrics line."""

    def message(self, text: str, level: Level = "info") -> None:
        """Show an event, such as a worker's traceback."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show the end of the run; `summary` is the content of `summary.json`."""
