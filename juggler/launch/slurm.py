"""A run whose processes are jobs of Slurm: the driver, an array of learners, one of EnvRunners."""

from __future__ import annotations

import codecs
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from juggler.launch.commands import ROLES, Launch, LaunchError, learner, must_allow, player
from juggler.launch.following import DriverState, NoAnswer, Say, ask, taken_down
from juggler.launch.scaling import Wanted
from juggler.learner.process.program import LEARNER

#: Runs a command in the background and waits for it, so that the shell can pass signals on.
_RUN = """\
child=
stopped=
again=
# The end of the run: `juggler launch` sends USR2.
trap 'stopped=1; [ "$child" ] && kill -TERM "$child"' USR2 INT
# Slurm sends USR1 two minutes before the time limit, and TERM to a job that it preempts or cancels.
trap 'again=1; [ "$child" ] && kill -TERM "$child"' USR1 TERM
run() {{
  "$@" &
  child=$!
  # A signal may have come between two commands.
  [ "$stopped$again" ] && kill -TERM "$child"
  while :; do
    wait "$child"
    status=$?
    # A signal ends the wait, and not the child.
    [ "$status" -gt 128 ] && kill -0 "$child" 2> /dev/null || break
  done
  # The child may have ended just after a signal had ended the wait.
  wait "$child"
  status=$?
  child=
}}
queue_again() {{
  # A preempted job without a grace time is in the queue already, and a cancelled one stays away.
  job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
  [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ] || return
  # Slurm ends this script: the end of a script that went first may be taken for that of the next.
  scontrol requeue "$job" && sleep 60
}}
"""

#: Fields: options, work, every (seconds), keep, drop, status, counts, command.
DRIVER_SCRIPT = (
    """\
#!/bin/bash
{options}
cd {work} || exit 1
export OMP_NUM_THREADS=1
"""
    + _RUN
    + """\
# As many workers in the queue as are wanted: after an interruption, the driver has sent them home.
keep() {{
  wanted=$(cat "$2") || return
  there=$(squeue --me --noheader --array --name="$1" --sort=-i --format=%i) || return
  number=$(echo "$there" | grep -c .)
  if [ "$number" -lt "$wanted" ]; then
    sbatch --parsable --array="0-$((wanted - number - 1))" "$3"
  elif [ "$number" -gt "$wanted" ]; then
    echo "$there" | head -n "$((number - wanted))" | xargs scancel
  fi
}}
keep_all() {{
  # What is being submitted then is submitted first, so that it can be cancelled.
  trap exit TERM
  while :; do
    sleep {every} &
    wait $!
{keep}
  done
}}
keep_all > /dev/null 2>&1 &
keeping=$!
while :; do
  run {command}
  # Killed, and not by us: it goes on from its newest checkpoint.
  [ "$status" -gt 128 ] && [ -z "$stopped$again" ] || break
  sleep 5
done
kill "$keeping" 2> /dev/null
wait "$keeping"
if [ "$again" ] && [ -z "$stopped" ] && [ "$status" != 0 ]; then
  # The counts stay. 1: the learner was preempted first, so there is no last checkpoint.
  queue_again
else
  echo "$status" > {status}
  rm -f {counts}
{drop}
fi
exit "$status"
"""
)

#: Fields: options, work, tls, command, driver (the name of the driver's job).
WORKER_SCRIPT = (
    """\
#!/bin/bash
{options}
cd {work} || exit 1
export OMP_NUM_THREADS=1
{tls}
"""
    + _RUN
    + """\
while :; do
  run {command} --reattach-seconds 0
  # 0: the driver has sent it home.
  [ "$status" != 0 ] && [ -z "$stopped$again" ] || break
  # A driver that was cancelled does not come back.
  there=$(squeue --me --noheader --name={driver} --format=%i) && [ -z "$there" ] && break
  sleep 5
done
[ "$again" ] && queue_again
exit "$status"
"""
)


_GONE_SECONDS = 20.0
_KEEP_SECONDS = 10  # between looks at how many workers are in the queue
_JUGGLER = [sys.executable, "-m", "juggler"]
_ask = partial(ask, advice="launch from a host of a Slurm cluster")
#: Minutes, minutes:seconds, hours:minutes:seconds, days-hours, and so on.
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
    r"|(?:(?P<h>\d+):(?=\d+:))?(?P<m>\d+)(?::(?P<s>\d+))?)"
)
_NO_LIMIT = ("UNLIMITED", "INFINITE")
#: Slurm is told to send a signal so long before the limit.
_NOTICE_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """How many processes, and what Slurm is to know of them.

    Attributes:
        numbers: how many, by role.
        partition: of all jobs; "": Slurm's default.
        time: the limit of all jobs; "": Slurm's default.
        all: further options of sbatch for all jobs.
        learner: further ones for learners.
        envrunner: further ones for EnvRunners and evaluators.
    """

    numbers: Mapping[str, int]
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
            LaunchError: a number is out of range, or the time limit or an option of sbatch is none.
        """
        must_allow(jobs.numbers)
        _check_time(jobs.time)
        for option in (*jobs.all, *jobs.learner, *jobs.envrunner):
            if not option.startswith("-"):
                raise LaunchError(f"{option!r}: write an option of sbatch as --{option}")
        self._launch, self._jobs, self._say = launch, jobs, say
        self._wanted = Wanted(launch.directory)
        self._log, self._shown = launch.directory / "logs" / "driver.log", 0
        # A look at the file may end in the middle of a character.
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._gone = float("inf")  # since when the driver has no job

    def scripts(self) -> dict[Path, str]:
        """The scripts that are submitted, by their paths; the driver's first."""
        directory, jobs = self._launch.directory, self._jobs
        driver = self._launch.driver("0.0.0.0:0", _JUGGLER, jobs.numbers[LEARNER])
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
            role: learner(where, _JUGGLER, -1, "", self._launch.of_learners)
            if role == LEARNER
            else player(role, where, _JUGGLER, -1)
            for role in ROLES
        }
        tls = (
            ""
            if self._launch.insecure
            else f"export JUGGLER_TLS={shlex.quote(str(self._launch.tls))}"
        )
        for role, command in words.items():
            own = jobs.learner if role == LEARNER else jobs.envrunner
            found[self._path(role)] = WORKER_SCRIPT.format(
                options=self._options(role, own),
                work=shlex.quote(str(Path.cwd())),
                tls=tls,
                command=shlex.join(command),
                driver=shlex.quote(self._name("driver")),
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
        nodes = _ask("sinfo", "--noheader", "--Node", "--format=%N %n %o").split()
        self._launch.make_certificates(sorted(set(nodes)))
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._shown = (
                self._log.stat().st_size if self._log.exists() else 0
            )  # by a launch before
            (self._launch.directory / "status").unlink(missing_ok=True)
            for path, script in self.scripts().items():
                path.write_text(script)
            for role in ROLES:
                self._wanted.begin(role, self._jobs.numbers[role])
        except OSError as error:
            raise LaunchError(f"cannot write {self._launch.directory}: {error}") from error
        counts = {role: self._jobs.numbers[role] for role in ROLES if self._jobs.numbers[role]}
        with taken_down(self):
            _ask("sbatch", "--parsable", str(self._path("driver")))
            for role, count in counts.items():
                _ask("sbatch", "--parsable", f"--array=0-{count - 1}", str(self._path(role)))
        workers = ", ".join(f"{count} x {role}" for role, count in counts.items())
        self._say(
            f"submitted a driver, {workers}; logs and scripts are in {self._launch.directory}"
        )

    def driver_state(self, ending: bool) -> DriverState:
        """See `EngineRun`. A job that is queued again is away for a while."""
        name = f"--name={self._name('driver')}"
        said = _ask("squeue", "--me", "--noheader", name, "--format=%T (%r)").strip()
        if said:
            self._gone = float("inf")
            running = said.startswith("RUNNING")
            return DriverState("" if running else f"its job is {said.splitlines()[0]}", running)
        self._gone = min(self._gone, time.monotonic())
        try:
            return DriverState(status=int((self._launch.directory / "status").read_text()))
        except (OSError, ValueError):
            if ending:
                return DriverState(status=-1)
            if time.monotonic() - self._gone < _GONE_SECONDS:
                return DriverState()
            raise LaunchError(
                "the driver's job is gone, and the driver had not ended: it was cancelled, or "
                f"could not start; see {self._log.parent}"
            ) from None

    def show(self) -> None:
        """See `EngineRun`."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._shown)
                more = file.read()
        except OSError:
            return
        self._shown += len(more)
        sys.stdout.write(self._decode(more))
        sys.stdout.flush()

    def end(self) -> None:
        """See `EngineRun`. When Slurm preempts the job, it sends SIGTERM itself."""
        _ask("scancel", "--me", "--batch", "--signal=USR2", f"--name={self._name('driver')}")

    def take_down(self) -> None:
        """See `EngineRun`."""
        self._wanted.forget()
        problems: list[NoAnswer] = []
        for role in ("driver", *ROLES):
            try:
                _ask("scancel", "--me", f"--name={self._name(role)}")
            except NoAnswer as error:
                problems.append(error)  # the jobs of the others are to end all the same
        if problems:
            raise problems[0]

    # -- names and options ----------------------------------------------------------------------

    def _name(self, role: str) -> str:
        return f"{self._launch.label}-{role}"

    def _path(self, role: str) -> Path:
        return self._launch.directory / f"{role}.sbatch"

    def _options(self, role: str, own: Sequence[str]) -> str:
        jobs, name = self._jobs, "driver.log" if role == "driver" else f"{role}-%a.log"
        log = f"{self._log.parent}/".replace("%", "%%") + name  # % begins what Slurm fills in
        found = [f"--job-name={self._name(role)}", f"--output={shlex.quote(log)}"]
        found += ["--open-mode=append"]
        found += ["--requeue", f"--signal=B:USR1@{_NOTICE_SECONDS}", "--ntasks=1"]
        found += [f"--partition={jobs.partition}"] if jobs.partition else []
        found += [f"--time={jobs.time}"] if jobs.time else []
        return "\n".join(f"#SBATCH {_one_line(option)}" for option in [*found, *jobs.all, *own])

    def _queued(self) -> list[str]:
        names = ",".join(self._name(role) for role in ("driver", *ROLES))
        return _ask("squeue", "--me", "--noheader", f"--name={names}", "--format=%A").split()


def _one_line(option: str) -> str:
    """Check that an option cannot add commands to the job script.

    Raises:
        LaunchError: the option has a line break or another unprintable character.
    """
    if not option.isprintable():
        raise LaunchError(
            f"an option of sbatch is {option!r}: leave out what cannot be printed, such as line "
            "breaks. It comes from the options of `juggler launch` or the run directory's name"
        )
    return option


def _check_time(given: str) -> None:
    """
    Raises:
        LaunchError: Slurm would not take this time limit, or it is too short to train in.
    """
    if not given or given.upper() in _NO_LIMIT:
        return
    found = _TIME.fullmatch(given)
    if found is None:
        raise LaunchError(
            f"--time {given}: give minutes, or HOURS:MINUTES:SECONDS, or DAYS-HOURS:MINUTES:SECONDS"
        )
    part = {name: int(text or 0) for name, text in found.groupdict().items()}
    hours = 24 * part["days"] + part["hours"] + part["h"]
    seconds = 3600 * hours + 60 * (part["minutes"] + part["m"]) + part["seconds"] + part["s"]
    if 0 < seconds <= _NOTICE_SECONDS:  # 0: no limit
        raise LaunchError(
            f"--time {given}: must be more than {_NOTICE_SECONDS // 60} minutes, since the run "
            "writes its checkpoint so long before the limit"
        )
