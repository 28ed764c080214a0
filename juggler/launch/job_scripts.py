"""The scripts of Slurm's jobs."""

from __future__ import annotations

#: Runs a command in the background and waits for it, so that the shell can pass signals on.
_RUN = """\
child=
stopped=
again=
trap 'stopped=1; [ "$child" ] && kill -TERM "$child"' TERM INT
# Slurm sends it two minutes before the time limit.
trap 'again=1; [ "$child" ] && kill -TERM "$child"' USR1
run() {{
  "$@" &
  child=$!
  while :; do
    wait "$child"
    status=$?
    # A signal ends the wait, and not the child.
    [ "$status" -gt 128 ] && kill -0 "$child" 2> /dev/null || break
  done
  child=
}}
"""

#: Fields: options, work, every (seconds), fill, drop, status, command.
DRIVER_SCRIPT = (
    """\
#!/bin/bash
{options}
cd {work} || exit 1
export OMP_NUM_THREADS=1
"""
    + _RUN
    + """\
# Submits what is missing of the workers: after an interruption the driver has sent them home.
fill() {{
  wanted=$(cat "$2")
  there=$(squeue --me --noheader --array --name="$1" | wc -l)
  [ "$there" -ge "$wanted" ] || sbatch --parsable --array="0-$((wanted - there - 1))" "$3"
}}
keep_filled() {{
  while sleep {every}; do
{fill}
  done
}}
keep_filled > /dev/null 2>&1 &
filling=$!
while :; do
  run {command}
  # Killed, and not by us: it goes on from its newest checkpoint.
  [ "$status" -gt 128 ] && [ -z "$stopped$again" ] || break
  sleep 5
done
kill "$filling"
if [ "$again" ] && [ "$status" = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
else
  echo "$status" > {status}
{drop}
fi
exit "$status"
"""
)

#: Fields: options, work, tls, command.
WORKER_SCRIPT = (
    """\
#!/bin/bash
{options}
cd {work} || exit 1
export OMP_NUM_THREADS=1
{tls}
host=$(hostname)
"""
    + _RUN
    + """\
while :; do
  run {command} --reattach-seconds 0
  # 0: the driver has sent it home.
  [ "$status" != 0 ] && [ -z "$stopped$again" ] || break
  sleep 5
done
[ "$again" ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""
)
