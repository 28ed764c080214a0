"""The scripts of Slurm's jobs."""

from __future__ import annotations

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
