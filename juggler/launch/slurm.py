"""A run whose processes are jobs of Slurm: the driver, an array of learners, one of EnvRunners."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from juggler.launch.commands import Launch, LaunchError, environment_runner, learner
from juggler.launch.job_scripts import DRIVER_SCRIPT, WORKER_SCRIPT
from juggler.launch.scaling import ROLES, Wanted

Say = Callable[[str], None]

_LOOK_SECONDS = 1.0
_ASK_SECONDS = 5.0  # between questions to Slurm
_END_SECONDS = 90.0  # for a driver to end in order
_ANSWER_SECONDS = 60.0
_GONE_SECONDS = 20.0
_KEEP_SECONDS = 10  # between looks at how many workers are in the queue
_JUGGLER = [sys.executable, "-m", "juggler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """How many processes, and what Slurm is to know of them.

    Attributes:
        env_runners: how many.
        learners: how many.
        partition: of all jobs; "": Slurm's default.
        time: the limit of all jobs; "": Slurm's default.
        all: further options of sbatch for all jobs.
        learner: further ones for learners.
        envrunner: further ones for EnvRunners.
    """

    env_runners: int = 1
    learners: int = 1
    partition: str = ""
    time: str = ""
    all: Sequence[str] = ()
    learner: Sequence[str] = ()
    envrunner: Sequence[str] = ()


class SlurmRun:
    """Submits the jobs of a run, and follows it.

    The run directory, and what lies beside it, must be on a file system that all nodes share:
    workers find the address of the driver there.
    """

    def __init__(self, launch: Launch, jobs: Jobs, say: Say) -> None:
        """
        Args:
            launch: the run.
            jobs: how many, and where.
            say: tells people.

        Raises:
            LaunchError: a number is out of range, or several learners are not allowed.
        """
        for what, count in (("env-runners", jobs.env_runners), ("learners", jobs.learners)):
            if not 1 <= count <= 4096:
                raise LaunchError(f"--{what} {count}: must be from 1 to 4096")
        launch.must_allow(jobs.learners)
        self._launch, self._jobs, self._say = launch, jobs, say
        self._wanted = Wanted(launch.directory)
        self._signals: list[int] = []

    def scripts(self) -> dict[Path, str]:
        """The scripts that are submitted, by their paths; the driver's first."""
        directory, jobs = self._launch.directory, self._jobs
        driver = self._launch.driver("0.0.0.0:0", _JUGGLER)
        if not any(option.startswith("--num-learners") for option in self._launch.options):
            driver += ["--num-learners", str(jobs.learners)]
        if not any(option.startswith("--progress") for option in self._launch.options):
            driver += ["--progress", "plain"]
        found = {
            self._path("driver"): DRIVER_SCRIPT.format(
                options=self._options("driver", ()),
                work=shlex.quote(str(Path.cwd())),
                every=_KEEP_SECONDS,
                keep="\n".join(
                    "    "
                    + shlex.join(
                        [
                            "keep",
                            self._name(role),
                            str(self._wanted.path(role)),
                            str(self._path(role)),
                        ]
                    )
                    for role in ROLES
                ),
                drop="\n".join(
                    f"  scancel --me --name={shlex.quote(self._name(role))}" for role in ROLES
                ),
                status=shlex.quote(str(directory / "status")),
                counts=shlex.join(str(self._wanted.path(role)) for role in ROLES),
                command=shlex.join(driver),
            )
        }
        where = str(self._launch.run_dir)
        words = {
            "learner": learner(where, _JUGGLER, -1, "$host", self._launch.plain),
            "envrunner": environment_runner(where, _JUGGLER, -1),
        }
        tls = (
            ""
            if self._launch.insecure
            else f"export JUGGLER_TLS={shlex.quote(str(self._launch.tls))}"
        )
        for role, command in words.items():
            own = jobs.learner if role == "learner" else jobs.envrunner
            found[self._path(role)] = WORKER_SCRIPT.format(
                options=self._options(role, own),
                work=shlex.quote(str(Path.cwd())),
                tls=tls,
                command=shlex.join(command).replace("'$host:0'", '"$host:0"'),
            )
        return found

    def submit(self) -> None:
        """Write the scripts and the certificates, and submit the jobs.

        Raises:
            LaunchError: Slurm is not here, or refuses; the run is in the queue already.
        """
        if queued := self._queued():
            raise LaunchError(
                f"{self._launch.run_dir} has jobs in the queue already ({', '.join(queued)}): "
                f"follow them in {self._launch.directory / 'logs'}, or end them with scancel"
            )
        nodes = _asked("sinfo", "--noheader", "--Node", "--format=%N %n %o").split()
        self._launch.make_certificates(sorted(set(nodes)))
        try:
            (self._launch.directory / "logs").mkdir(parents=True, exist_ok=True)
            (self._launch.directory / "status").unlink(missing_ok=True)
            for path, script in self.scripts().items():
                path.write_text(script)
            for role, count in zip(
                ROLES, (self._jobs.learners, self._jobs.env_runners), strict=True
            ):
                self._wanted.begin(role, count, one=role == "learner" and not self._launch.plain)
        except OSError as error:
            raise LaunchError(f"cannot write {self._launch.directory}: {error}") from error
        counts = {"driver": 0, "learner": self._jobs.learners, "envrunner": self._jobs.env_runners}
        for role, count in counts.items():
            array = [f"--array=0-{count - 1}"] if count else []
            try:
                _asked("sbatch", "--parsable", *array, str(self._path(role)))
            except LaunchError:
                self._cancel()
                raise
        self._say(
            f"submitted a driver, {counts['learner']} x learner and {counts['envrunner']} x "
            f"envrunner; logs and scripts are in {self._launch.directory}"
        )

    def follow(self) -> int:
        """Show what the driver prints until its job is gone -> the driver's exit status. A signal
        ends the run in order; a second one cancels all jobs at once.

        Raises:
            LaunchError: the job was gone before the driver had ended.
        """
        log, status = self._launch.directory / "logs" / "driver.log", None
        with ExitStack() as last:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                last.callback(signal.signal, number, signal.signal(number, self._note))
            shown, asked, state, due, end = 0, 0, "", 0.0, float("inf")
            # Since when there is no job; one that is queued again is away for a while.
            gone = float("inf")
            while status is None:
                shown = _show_more(log, shown)
                now = time.monotonic()
                if self._signals or now > end:
                    self._signals.clear()
                    asked += 1
                    end = min(end, now + _END_SECONDS) if asked == 1 else float("inf")
                    self._stop(at_once=asked > 1 or not state.startswith("RUNNING"))
                if now >= due:
                    due = now + _ASK_SECONDS
                    before, state = state, self._state()
                    if state != before and state and not state.startswith("RUNNING"):
                        self._say(f"the driver's job: {state}")
                    gone = float("inf") if state else min(gone, now)
                    status = self._status(asked > 0, now - gone) if not state else None
                time.sleep(_LOOK_SECONDS)
            _show_more(log, shown)
        self._cancel()
        return status

    # -- names and options ----------------------------------------------------------------------

    def _name(self, role: str) -> str:
        return f"juggler-{self._launch.tag}-{role}"

    def _path(self, role: str) -> Path:
        return self._launch.directory / f"{role}.sbatch"

    def _options(self, role: str, own: Sequence[str]) -> str:
        jobs, logs = self._jobs, self._launch.directory / "logs"
        log = logs / ("driver.log" if role == "driver" else f"{role}-%a.log")
        found = [f"--job-name={self._name(role)}", f"--output={log}", "--open-mode=append"]
        found += ["--requeue", "--signal=B:USR1@120", "--ntasks=1"]
        found += [f"--partition={jobs.partition}"] if jobs.partition else []
        found += [f"--time={jobs.time}"] if jobs.time else []
        return "\n".join(f"#SBATCH {option}" for option in [*found, *jobs.all, *own])

    # -- Slurm ----------------------------------------------------------------------------------

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _queued(self) -> list[str]:
        names = ",".join(self._name(role) for role in ("driver", *ROLES))
        return _asked("squeue", "--me", "--noheader", f"--name={names}", "--format=%A").split()

    def _state(self) -> str:
        """State of the driver's job, and the reason if it waits; "" if there is none."""
        name = f"--name={self._name('driver')}"
        said = _asked("squeue", "--me", "--noheader", name, "--format=%T (%r)").splitlines()
        return said[0].strip() if said else ""

    def _status(self, asked: bool, gone: float) -> int | None:
        """The driver's exit status, when its job is gone; None: it may come back.

        Args:
            asked: whether somebody has asked for the end.
            gone: for how many seconds there has been no job.
        """
        try:
            return int((self._launch.directory / "status").read_text())
        except (OSError, ValueError):
            if asked:
                return 128 + signal.SIGINT
            if gone < _GONE_SECONDS:
                return None
            raise LaunchError(
                "the driver's job is gone, and the driver had not ended: it was cancelled, or "
                f"could not start; see {self._launch.directory / 'logs'}"
            ) from None

    def _stop(self, at_once: bool) -> None:
        if at_once:
            self._say("cancelling all jobs")
            return self._cancel()
        self._say("ending the run; once more cancels all jobs")
        name = f"--name={self._name('driver')}"
        _asked("scancel", "--me", "--batch", "--signal=TERM", name)
        return None

    def _cancel(self) -> None:
        self._wanted.forget()
        for role in ("driver", *ROLES):
            _asked("scancel", "--me", f"--name={self._name(role)}")


def _asked(*command: str) -> str:
    """What a command of Slurm prints.

    Raises:
        LaunchError: it is not here, does not answer, or fails.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no command `{command[0]}` here: launch from a host of a Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{command[0]}` gave no answer in {_ANSWER_SECONDS:.0f} s") from None
    if done.returncode:
        raise LaunchError(f"`{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _show_more(log: Path, shown: int) -> int:
    """Print what was added to a file since so many bytes -> how many there are now."""
    try:
        with log.open("rb") as file:
            file.seek(shown)
            more = file.read()
    except OSError:
        return shown
    sys.stdout.write(more.decode(errors="replace"))
    sys.stdout.flush()
    return shown + len(more)
