"""A run whose processes are jobs of Slurm."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
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
from juggler.runtime.actors.tls import TLS_VARIABLE

#: Begins a job, and runs a command in the background, so that the shell can pass signals on.
#: Fields: options, work.
_BEGIN = """\
#!/bin/bash
{options}
cd {work} || exit 1
export OMP_NUM_THREADS=1
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
    # A signal ends the wait, not the child.
    [ "$status" -gt 128 ] && kill -0 "$child" 2> /dev/null || break
  done
  # The child may have ended just after a signal had ended the wait.
  wait "$child"
  status=$?
  child=
}}
queue_again() {{
  # A preempted job without a grace time is already in the queue, and a cancelled one stays away.
  job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
  [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ] || return
  # Slurm ends this script. If it ended first, Slurm could take its end for the next job's.
  scontrol requeue "$job" && sleep 60
}}
"""

#: Fields: options, work, every (seconds), keep, drop, status, counts, command.
DRIVER_SCRIPT = (
    _BEGIN
    + """\
# Keeps the wanted number of workers in the queue: after an interruption, the driver released them.
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
  # A submission in progress finishes first, so that it can be cancelled.
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
  # Killed from outside: it resumes from its newest checkpoint.
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
    _BEGIN
    + """\
{tls}
while :; do
  run {command} --reattach-seconds 0
  # 0: the driver released it.
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
        launch, work = self._launch, shlex.quote(str(Path.cwd()))
        names = {role: self._launch.name(role) for role in ROLES}
        counts = {role: str(launch.count_file(role)) for role in ROLES}
        keep = ([names[role], counts[role], str(self._path(role))] for role in ROLES)
        drop = (f"  scancel --me --name={shlex.quote(name)}" for name in names.values())
        # Workers find its port in the run directory: several runs may share a node.
        driver = launch.driver("0.0.0.0:0", self._numbers[LEARNER])
        found = {
            self._path("driver"): DRIVER_SCRIPT.format(
                options=self._options("driver", ()),
                work=work,
                every=_KEEP_SECONDS,
                keep="\n".join(f"    {shlex.join(['keep', *each])}" for each in keep),
                drop="\n".join(drop),
                status=shlex.quote(str(launch.directory / "status")),
                counts=shlex.join(counts.values()),
                command=shlex.join(driver),
            )
        }
        # The driver has --tls in its command; scripts of workers only name the directory.
        tls = "" if launch.insecure else f"export {TLS_VARIABLE}={shlex.quote(str(launch.tls))}"
        for role in ROLES:
            found[self._path(role)] = WORKER_SCRIPT.format(
                options=self._options(
                    role, self._of_learners if role == LEARNER else self._of_players
                ),
                work=work,
                tls=tls,
                command=shlex.join(launch.worker(role, str(launch.run_dir), JUGGLER)),
                driver=shlex.quote(self._launch.name("driver")),
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


def _one_line(option: str) -> str:
    """Check that an option cannot add commands to the job script."""
    if not option.isprintable():
        raise LaunchError(
            f"an option of sbatch is {option!r}: leave out unprintable characters, such as line "
            "breaks. It comes from the options of `juggler launch` or the run directory's name"
        )
    return option
