from __future__ import annotations

import json
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from sqlalchemy import Engine, event
from support.changes import SkippedTime

from juggler.driver.reporting import run_directory
from juggler.experiments import runs


class ScriptedRun:
    """Stands in for `subprocess.Popen` of `juggler train`."""

    def __init__(self, command: list[str], *, stdout: IO[bytes], **_: Any) -> None:
        self.returncode: int | None = None
        first, second, *rest = command[5:]
        self._resumed = first == "--resume"
        self._directory = Path(second if self._resumed else rest[0])
        self._log = Path(stdout.name)
        source = self._directory / "config.toml" if self._resumed else Path(first)
        self._text = source.read_text()
        self._stopped = False
        self._steps = self._run(tomllib.loads(self._text))

    def poll(self) -> int | None:
        """Goes on with the run."""
        if self.returncode is None:
            self.returncode = next(self._steps)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            pass
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGINT
        self._stopped = True

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL if self.returncode is None else self.returncode

    def _run(self, config: dict[str, Any]) -> Iterator[int | None]:
        """Its exit status, once it has one."""
        yield None
        (self._directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self._directory / "config.toml").write_text(self._text)
        if config.get("gamma") == 0.25:
            self._log.write_text("juggler train: the mast is broken\n")
            yield 1
        metrics = self._directory / "metrics.jsonl"
        begun = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        line: dict[str, Any] = {}
        for i in range(begun + 1, 11):
            line = _line(config, i)
            with metrics.open("a") as file:
                print(json.dumps(line), file=file)
            if i == 5 and config.get("gamma") == 0.5:
                yield -signal.SIGKILL
            if i == 5 and config.get("reward_scale") == 2.0:
                signal.raise_signal(signal.SIGINT)
                while not self._stopped:
                    yield None
            if config.get("value_coefficient", 0.0):
                yield None
            if self._stopped:
                break
        (self._directory / "checkpoints" / f"{i:09}").mkdir(exist_ok=True)
        reason = "interrupted" if self._stopped else "stop_steps"
        summary = {**line, "solved": False, "reason_for_stop": reason}
        (self._directory / "summary.json").write_text(json.dumps(summary))
        yield 130 if self._stopped else 0


def _line(config: dict[str, Any], i: int) -> dict[str, Any]:
    line = {
        "env_steps_sampled": 100 * i,
        "env_steps_trained": 100 * i,
        "wall_time": i / 10,
        "training_time": i / 10,
        "episode_return_mean": config["lr"] * i,
    }
    if config.get("gamma") == 0.75:
        sides = {"a": config["lr"] * i, "b": -config["lr"] * i}
        line["by_agent"] = {name: {"episode_return_mean": of_it} for name, of_it in sides.items()}
        line["episode_return_mean"] = sum(sides.values()) + 1e-12
    return line


def _no_disk(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = MEMORY")


@pytest.fixture
def scripted_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Script runs and their clock; give Optuna a database in memory."""
    subprocess = SimpleNamespace(Popen=ScriptedRun, DEVNULL=None, STDOUT=None)
    monkeypatch.setattr(runs, "subprocess", subprocess)
    for module in (runs, run_directory):
        monkeypatch.setattr(module, "time", SkippedTime())
    event.listen(Engine, "connect", _no_disk)
    yield
    event.remove(Engine, "connect", _no_disk)
