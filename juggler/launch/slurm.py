"""A run whose processes are jobs of Slurm."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from juggler.launch.engine import (
    JUGGLER,
    ROLES,
    DriverState,
    EngineRun,
    Launch,
    LaunchError,
    NoAnswer,
    Report,
    Tail,
    ask,
)
from juggler.learner.process.learner_program import LEARNER

_SCRIPTS = resources.files("juggler.launch") / "manifests" / "slurm"
_GONE_SECONDS = 20.0
_KEEP_SECONDS = 10  # between two checks of the number of workers in the queue
_NOTICE_SECONDS = 120  # between Slurm's signal and the time limit
_ask = partial(ask, advice="launch from a host of a Slurm cluster")


class SlurmRun(EngineRun):
    """Submits the jobs of a run, and follows it.

    The run directory and its parent must be on a file system that all nodes share: workers find
    the driver's address there.

    Raises:
        LaunchError: a number is out of range, or an option does not begin with a dash.
    """

    def __init__(
        self,
        launch: Launch,
        numbers: Mapping[str, int],
        report: Report,
        options: Sequence[str] = (),
        of_learners: Sequence[str] = (),
        of_players: Sequence[str] = (),
    ) -> None:
        super().__init__(launch, numbers, report)
        for option in (*options, *of_learners, *of_players):
            if not option.startswith("-"):
                raise LaunchError(f"{option!r}: write an option of sbatch as --{option}")
        self._all, self._of_learners, self._of_players = options, of_learners, of_players
        self._log, self._shown = launch.directory / "logs" / "driver.log", 0  # bytes
        self._gone = float("inf")  # time since which the driver has no job

    def plan(self) -> str:
        """Return the scripts of all jobs."""
        scripts = self.scripts()
        for role, number in self._numbers.items():
            if not number:
                scripts[self._path(role)] = "# Not submitted now: it is for `juggler scale`.\n"
        return "\n".join(f"# {path}\n{script}" for path, script in scripts.items())

    def scripts(self) -> dict[Path, str]:
        """Return the scripts to submit, by path; the driver's first."""
        launch, directory = self._launch, self._launch.directory
        counts = [str(launch.count_file(role)) for role in ROLES]
        # Workers find its port in the run directory: several runs may share a node.
        driver = job_script(
            "driver",
            self._options("driver", ()),
            every=[str(_KEEP_SECONDS)],
            names=[launch.name(role) for role in ROLES],
            counts=counts,
            scripts=[str(self._path(role)) for role in ROLES],
            status_file=[str(directory / "status")],
            command=launch.driver("0.0.0.0:0", self._numbers[LEARNER]),
        )
        found = {self._path("driver"): driver}
        for role in ROLES:
            own = self._of_learners if role == LEARNER else self._of_players
            # The driver has --tls in its command; scripts of workers only name the directory.
            found[self._path(role)] = job_script(
                "worker",
                self._options(role, own),
                tls=[] if launch.insecure else [str(launch.tls)],
                driver=[launch.name("driver")],
                command=launch.worker(role, str(launch.run_dir), JUGGLER),
            )
        return found

    def submit(self) -> None:
        """Write the scripts and the certificates, and submit the jobs.

        Raises:
            LaunchError: Slurm is missing, or refuses; or the run is already in the queue.
        """
        directory = self._launch.directory
        names = ",".join(self._launch.name(role) for role in ("driver", *ROLES))
        queued = _ask("squeue", "--me", "--noheader", f"--name={names}", "--format=%A").split()
        if queued:
            raise LaunchError(
                f"{self._launch.run_dir} already has jobs in the queue ({', '.join(queued)}): "
                f"follow them in {directory / 'logs'}, or end them with scancel"
            )
        nodes = _ask("sinfo", "--noheader", "--Node", "--format=%N %n %o").split()
        counts = {role: count for role, count in self._numbers.items() if count}
        with self.submitting(sorted(set(nodes))):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.touch()
            # Output that an earlier launch has shown is not shown again.
            self._shown = self._log.stat().st_size
            (directory / "status").unlink(missing_ok=True)
            for path, script in self.scripts().items():
                path.write_text(script)
            _ask("sbatch", "--parsable", str(self._path("driver")))
            for role, count in counts.items():
                _ask("sbatch", "--parsable", f"--array=0-{count - 1}", str(self._path(role)))
        workers = ", ".join(f"{count} x {role}" for role, count in counts.items())
        self._report(f"submitted a driver, {workers}; logs and scripts are in {directory}")

    def driver_state(self, ending: bool) -> DriverState:
        """Ask Slurm; a requeued job is missing for a while."""
        name = f"--name={self._launch.name('driver')}"
        answer = _ask("squeue", "--me", "--noheader", name, "--format=%T (%r)").strip()
        if answer:
            self._gone = float("inf")
            running = answer.startswith("RUNNING")
            return DriverState("" if running else f"its job is {answer.splitlines()[0]}", running)
        # The driver's script writes its status, since Slurm forgets jobs.
        self._gone = min(self._gone, time.monotonic())
        try:
            return DriverState(status=int((self._launch.directory / "status").read_text()))
        except (OSError, ValueError):
            if ending:
                return DriverState(status=-1)
            if time.monotonic() - self._gone < _GONE_SECONDS:
                return DriverState()
            raise LaunchError(
                "the driver's job is gone, but the driver had not ended: it was cancelled, or "
                f"could not start; see {self._log.parent}"
            ) from None

    def poll(self) -> None:
        if self._tail is None:
            begin = f"--bytes=+{self._shown + 1}"
            self._tail = Tail("tail", begin, "--follow=name", "--retry", str(self._log))

    def end(self) -> None:
        """Send SIGUSR2; Slurm sends SIGTERM itself when it preempts the job."""
        _ask("scancel", "--me", "--batch", "--signal=USR2", f"--name={self._launch.name('driver')}")

    def tear_down(self) -> None:
        self.stop_showing()
        problems: list[NoAnswer] = []
        for role in ("driver", *ROLES):
            try:
                _ask("scancel", "--me", f"--name={self._launch.name(role)}")
            except NoAnswer as error:
                problems.append(error)  # jobs of other roles must still be ended
        if problems:
            raise problems[0]

    def _path(self, role: str) -> Path:
        return self._launch.directory / f"{role}.sbatch"

    def _options(self, role: str, own: Sequence[str]) -> str:
        name = "driver.log" if role == "driver" else f"{role}-%a.log"
        log = f"{self._log.parent}/".replace("%", "%%") + name  # Slurm replaces patterns with %
        found = [f"--job-name={self._launch.name(role)}", f"--output={shlex.quote(log)}"]
        signal = f"--signal=B:USR1@{_NOTICE_SECONDS}"
        found += ["--open-mode=append", "--requeue", signal, "--ntasks=1"]
        return "\n".join(f"#SBATCH {_one_line(option)}" for option in [*found, *self._all, *own])


def job_script(kind: str, options: str, **values: Sequence[str]) -> str:
    """Return the script of a job.

    Args:
        kind: driver or worker.
        options: lines for sbatch.
        values: arrays of the shell, by name.
    """
    given = {"work": [str(Path.cwd())], **values}
    arrays = "".join(f"{name}=({shlex.join(words)})\n" for name, words in given.items())
    commands = "".join((_SCRIPTS / f"{name}.sh").read_text() for name in ("job", kind))
    return f"#!/bin/bash\n{options}\n{arrays}{commands}"


def _one_line(option: str) -> str:
    """Check that an option cannot add commands to the job script."""
    if not option.isprintable():
        raise LaunchError(
            f"an option of sbatch is {option!r}: leave out unprintable characters, such as line "
            "breaks. It comes from the options of `juggler launch` or the run directory's name"
        )
    return option
