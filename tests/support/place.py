"""Commands, in this process or in a checked place."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from juggler.cli import main
from juggler.cli.status import Arguments, _statuses

REPOSITORY = Path(__file__).resolve().parents[2]
BUSY = 3.0  # Waits are this many times as long as a test says, for machines that are busy or slow.


class Place:
    """A directory, and all processes that were started in it."""

    def __init__(self) -> None:
        # Short, as a terminal's would be: Unix sockets have a limit.
        self.path = Path(tempfile.mkdtemp(prefix="jt-"))
        self._temporary = self.path / "tmp"
        self._temporary.mkdir()
        self._segments = set(os.listdir("/dev/shm"))
        self._started: list[subprocess.Popen[str]] = []
        self._count = 0

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text)
        return path

    def start(self, *arguments: object, **variables: str) -> Command:
        """Start `juggler ARGUMENTS` in a process group of its own."""
        return self.start_program(
            [sys.executable, "-m", "juggler", *map(str, arguments)], **variables
        )

    def start_program(self, program: list[str], **variables: str) -> Command:
        self._count += 1
        output = self.path / f"output-{self._count}"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._temporary),
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{self.path}",
            **variables,
        }
        with output.open("w") as file:
            process = subprocess.Popen(
                program,
                cwd=self.path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._started.append(process)
        return Command(process, output)

    def run(self, *arguments: object, seconds: float = 300, **variables: str) -> Command:
        """The same, to its end."""
        command = self.start(*arguments, **variables)
        command.wait(seconds)
        return command

    def processes(self) -> list[psutil.Process]:
        """Everything that was started here, directly or not, and still runs."""
        sessions = {process.pid for process in self._started}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if os.getsid(process.pid) in sessions:
                    found.append(process)
        return found

    def worker(self, title: str, seconds: float = 60) -> psutil.Process:
        """The process of that title, as soon as there is one."""

        def find() -> psutil.Process | None:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    if " ".join(process.cmdline()).strip() == f"juggler: {title}":
                        return process
            return None

        found: psutil.Process = eventually(find, seconds, f"no process 'juggler: {title}'")
        return found

    def assert_nothing_is_left(self) -> None:
        eventually(
            lambda: not self.processes(),
            10.0,
            lambda: f"left behind: {[(p.pid, p.cmdline()) for p in self.processes()]}",
        )
        assert list(self._temporary.iterdir()) == []
        # Those of a test that runs beside this one come and go.
        eventually(lambda: not self._segments_left(), 5.0, lambda: str(self._segments_left()))

    def _segments_left(self) -> set[str]:
        left = set(os.listdir("/dev/shm")) - self._segments
        return {name for name in left if not name.startswith("sem.mp")}

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for started in self._started:
            started.wait()
        shutil.rmtree(self.path)


class Command:
    """A command that runs or has run."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds * BUSY)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running after {error.timeout} s:\n{self.output}") from None

    def wait_for(self, text: str, seconds: float = 90) -> None:
        """Until the output says so, while the command runs."""
        eventually(
            lambda: text in self.output or self.status is not None,
            seconds,
            lambda: f"never said {text!r}:\n{self.output}",
        )
        assert text in self.output, self.output

    def address(self) -> str:
        """Where a driver waits for workers, once it does."""
        self.wait_for("waiting for workers at")
        line = next(line for line in self.output.splitlines() if "waiting for workers at" in line)
        return line.split()[-1]

    def interrupt(self) -> None:
        """Send Ctrl-C to the whole group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)


def workers_in(directory: Path, title: str) -> list[psutil.Process]:
    """The processes with this title whose working directory it is."""
    found = []
    for each in psutil.process_iter():
        try:
            if f"juggler: {title}" in " ".join(each.cmdline()) and each.cwd() == str(directory):
                found.append(each)
        except psutil.Error:
            continue
    return found


def eventually(
    what: Callable[[], Any], seconds: float, otherwise: str | Callable[[], str] = ""
) -> Any:
    """What `what` gives as soon as that is something."""
    deadline = time.monotonic() + seconds * BUSY
    while True:
        if result := what():
            return result
        if time.monotonic() > deadline:
            raise AssertionError(otherwise() if callable(otherwise) else otherwise)
        time.sleep(0.02)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Complete lines so far: a run may be writing one."""
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]


def checkpoints(run_dir: Path) -> list[Path]:
    """Runners after the first update: none continues from an earlier one."""
    return sorted(run_dir.glob("checkpoints/0*[1-9]*"))


def train_beyond_a_checkpoint(run_dir: Path, otherwise: Callable[[], str]) -> None:
    """Wait until updates are newer than the newest checkpoint.

    The status is up to a second old, so checkpoints must be further apart.
    """
    before = set(checkpoints(run_dir))
    new = eventually(lambda: set(checkpoints(run_dir)) - before, 60, otherwise)
    saved = max(int(checkpoint.name) for checkpoint in new)
    eventually(
        lambda: status(run_dir)["metrics"].get("weights_version", [0, 0])[1] > saved, 60, otherwise
    )


def env_runners(run_dir: Path) -> int:
    """How many the newest line of metrics has."""
    return int(metrics(run_dir)[-1]["num_env_runners"]) if metrics(run_dir) else 0


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


def assert_books_balance(run_dir: Path) -> None:
    """Check sampled = trained + dropped + in flight, for all lines."""
    assert (run_dir / "metrics.jsonl").read_text().endswith("\n")
    lines = [*metrics(run_dir), summary(run_dir)]
    for line in lines:
        modules = [each for each in line.get("by_module", {}).values() if "updates" in each]
        for books in (line, *modules):
            dropped = sum(books["env_steps_dropped"].values())
            accounted = books["env_steps_trained"] + dropped + books["env_steps_in_flight"]
            assert books["env_steps_sampled"] == accounted, line
        for count in ("env_steps_sampled", "env_steps_trained", "env_steps_in_flight"):
            assert not modules or line[count] == sum(each[count] for each in modules), line
    assert lines[-1]["env_steps_in_flight"] == 0


def trained_steps(run_dir: Path) -> int:
    """So far, while the run goes on."""
    lines = metrics(run_dir)
    return int(lines[-1]["env_steps_trained"]) if lines else 0


def trains_on(run_dir: Path, run: Command, more: int = 0, seconds: float = 60) -> None:
    """Wait until the run has trained on N more steps."""
    reached = trained_steps(run_dir) + more
    eventually(lambda: trained_steps(run_dir) > reached, seconds, lambda: run.output)


def status(where: Path) -> dict[str, Any]:
    """A running driver's status, as in `juggler status --json`."""
    return dict(next(_statuses(Arguments(where=str(where)))))


def status_of(*arguments: object) -> int:
    """Run a command and return its exit status."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as error:  # tyro's own way out
        return int(error.code or 0)


def options_of(command: str) -> type:
    """The dataclass of a command's options, also of subcommands."""
    own = {
        "envrunner": "worker:EnvRunnerArguments",
        "learner": "worker:LearnerArguments",
        "evaluator": "worker:EvaluatorArguments",
        "record": "evaluate:RecordArguments",
        "runs": "status:RunsArguments",
        "watch": "status:WatchArguments",
        "healthcheck": "doctor:HealthArguments",
        "certs": "launch:CertsArguments",
    }
    module, _, name = own.get(command, f"{command}:Arguments").partition(":")
    found: type = getattr(importlib.import_module(f"juggler.cli.{module}"), name)
    return found


@contextmanager
def raises_key(kind: type[Exception], key: str) -> Iterator[None]:
    """An error with a key: `key: why` or `key = value: why`."""
    with pytest.raises(kind, match=rf"(?<![\w.]){re.escape(key)}( =|:)"):
        yield


def first_of(cases: Iterable[Any]) -> list[Any]:
    """A parametrization's first case; the others are long tests.

    A case that is a tuple has the values of several arguments.
    """
    first, *others = cases
    return [first, *(left_to_long(case) for case in others)]


def left_to_long(case: Any) -> Any:
    """A case of a parametrization that only the long tests try."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)


#: Of a learning test whose seeds differ in nothing else.
seeds = pytest.mark.parametrize("seed", first_of(range(3)))
